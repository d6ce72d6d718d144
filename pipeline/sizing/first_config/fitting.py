"""The layout and the micro-batch with which a first configuration fits on its cluster."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.config.run import RunConfig, parse_config
from pipeline.config.sources import merged
from pipeline.errors import LayoutError
from pipeline.hosted.bases import unsupported_in
from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.sizing.first_config.method import method_under_gate
from pipeline.sizing.meta_device import NotTracedError

_MICRO_BATCHES = (16, 8, 4, 2, 1)
"""Sizes that are tried, the largest first: larger matrix products reach more of a GPU's peak."""


def fit_under_gate(
    values: dict[str, Any], spec: DecoderSpec, cluster: Cluster
) -> tuple[RunConfig, dict[str, Any]]:
    """The settings of a run with a gate, as `fit_to_cluster`.

    Open tokens have rows of their own, except in two cases: the vocabulary is extended, as the two
    together were not measured; or the run then does not fit, as rows take the most memory where the
    vocabulary is large.
    """
    with_rows = method_under_gate(spec, with_rows=True)
    without_rows = method_under_gate(spec, with_rows=False)
    if "vocabulary" not in values:
        try:
            return fit_to_cluster(values | {"method": with_rows}, spec, cluster)
        except LayoutError:
            # It is raised again below if the base does not fit without them either.
            pass
    return fit_to_cluster(values | {"method": without_rows}, spec, cluster)


def deepspeed_file(zero_stage: int, spec: DecoderSpec, cluster: Cluster) -> str:
    """DeepSpeed's file for a ZeRO stage, in fp32 on CPUs and for a base that asks for it."""
    is_in_fp32 = cluster.on_cpu or unsupported_in(spec, torch.bfloat16) is not None
    precision = "_fp32" if is_in_fp32 else ""
    return f"ds_configs/zero{zero_stage}{precision}.json"


def _layouts(spec: DecoderSpec, cluster: Cluster) -> list[dict[str, Any]]:
    """Settings of layouts, from the least communication to the least memory.

    Recomputation comes last, since it costs time: a fifth with products kept, half without.
    """
    layouts: list[dict[str, Any]] = [{"deepspeed": deepspeed_file(1, spec, cluster)}]
    if cluster.on_cpu:
        return layouts
    sharded = {"deepspeed": deepspeed_file(3, spec, cluster)}
    if not sharded["deepspeed"].endswith("_fp32.json"):
        layouts.append({"deepspeed": deepspeed_file(2, spec, cluster)})  # there is none in fp32
    recomputed = {**sharded, "activation_checkpointing": "all"}
    layouts.append(sharded)
    if spec.is_native:
        layouts.append({**recomputed, "recomputation_keeps": "products"})
    return [*layouts, recomputed]


def fit_to_cluster(
    values: dict[str, Any], spec: DecoderSpec, cluster: Cluster
) -> tuple[RunConfig, dict[str, Any]]:
    """The settings with the first layout that fits, and its largest micro-batch.

    Returns:
        The run.
        Its settings, without defaults.

    Raises:
        LayoutError: no layout fits.
    """
    per_rank = values["schedule"]["global_batch_size"] // cluster.gpus
    for layout in _layouts(spec, cluster):
        for micro_batch in _MICRO_BATCHES:
            if per_rank % micro_batch != 0:
                continue
            fitted = merged(merged(values, layout), {"schedule": {"micro_batch_size": micro_batch}})
            config = parse_config(fitted, source="the proposed configuration")
            estimator = open_estimator(config, cluster)
            try:
                memory, _ = estimator.memory(estimator.own_choice)
            except NotTracedError:
                # No memory can be estimated, which the dry run reports. The first layout is taken,
                # with the smallest micro-batch, which is likeliest to fit.
                fitted = merged(values, {"schedule": {"micro_batch_size": 1}})
                return parse_config(fitted, source="the proposed configuration"), fitted
            if memory.total <= cluster.recommended_bytes:
                return config, fitted
    raise LayoutError(
        f"memory: this base does not fit on {cluster.gpus} GPUs of {cluster.gpu_memory_gib:g} GiB; "
        "take more of them (--gpus, --gpu-memory-gib), or a tensor-parallel size that "
        "scale-cpt estimate recommends"
    )
