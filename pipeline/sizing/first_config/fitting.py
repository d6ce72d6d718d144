"""The layout and the micro-batch with which a first configuration fits on its cluster."""

from __future__ import annotations

from typing import Any

from pipeline.config.run import RunConfig, parse_config
from pipeline.config.sources import merged
from pipeline.errors import LayoutError
from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.sizing.first_config.method import with_own_weights
from pipeline.sizing.meta_device import NotTracedError

_MICRO_BATCHES = (16, 8, 4, 2, 1)


def fit_with_own_weights(
    values: dict[str, Any], spec: DecoderSpec, cluster: Cluster
) -> tuple[RunConfig, dict[str, Any]]:
    """The settings of a run with a gate, as `fit_to_cluster`.

    Open tokens have rows of their own unless the vocabulary is extended, beside which they were not
    measured, or the base then does not fit: in a large vocabulary they are the most memory.
    """
    with_rows = with_own_weights(values["method"], spec, with_rows=True)
    without_rows = with_own_weights(values["method"], spec, with_rows=False)
    if "vocabulary" not in values:
        try:
            return fit_to_cluster(values | {"method": with_rows}, cluster)
        except LayoutError:
            # It is raised again below if the base does not fit without them either.
            pass
    return fit_to_cluster(values | {"method": without_rows}, cluster)


def fit_to_cluster(values: dict[str, Any], cluster: Cluster) -> tuple[RunConfig, dict[str, Any]]:
    """The settings with the first layout that fits, and its largest micro-batch."""
    layouts: list[dict[str, Any]] = [{}]
    if not cluster.on_cpu:
        # From the least communication to the least memory; recomputation comes last, since it costs
        # time: a fifth with products kept, half without.
        layouts += [{"deepspeed": f"ds_configs/zero{stage}.json"} for stage in (2, 3)]
        recomputed = {"deepspeed": "ds_configs/zero3.json", "activation_checkpointing": "all"}
        layouts += [{**recomputed, "recomputation_keeps": "products"}, recomputed]
    per_rank = values["schedule"]["global_batch_size"] // cluster.gpus
    # The largest first: larger matrix products reach more of the peak.
    micro_batches = [size for size in _MICRO_BATCHES if per_rank % size == 0]
    for layout in layouts:
        for micro_batch in micro_batches:
            fitted = merged(merged(values, layout), {"schedule": {"micro_batch_size": micro_batch}})
            config = parse_config(fitted, source="the proposed configuration")
            estimator = open_estimator(config, cluster)
            try:
                memory, _ = estimator.memory(estimator.own_choice)
            except NotTracedError:
                # The dry run says so. The smallest micro-batch is likeliest to fit.
                fitted = merged(values, {"schedule": {"micro_batch_size": 1}})
                return parse_config(fitted, source="the proposed configuration"), fitted
            if memory.total <= cluster.recommended_bytes:
                return config, fitted
    raise LayoutError(
        f"memory: this base does not fit on {cluster.gpus} GPUs of {cluster.gpu_memory_gib:g} GiB; "
        "take more of them (--gpus, --gpu-memory-gib), or a tensor-parallel size that "
        "scale-cpt estimate recommends"
    )
