"""The plan of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.corpora import is_tokenized
from pipeline.errors import LayoutError
from pipeline.estimation.cluster import GIB, Cluster
from pipeline.estimation.disk import checkpoint_bytes, checkpoints_bytes, held_bytes, most_checkpoints, no_room
from pipeline.estimation.estimate import Choice, Estimate, Estimator
from pipeline.estimation.inputs import check_cluster
from pipeline.estimation.parameters import Parameters
from pipeline.files import free_bytes
from pipeline.planning.corpora import CorpusPlan, plan_corpora
from pipeline.planning.faults import Faults
from pipeline.planning.opening import Opened, open_run
from pipeline.planning.schedule import Duration, Milestone, duration_of, milestones, times
from pipeline.scale import expansion_folder as expansions
from pipeline.scale.expansion_folder import open_expansion


@dataclass(frozen=True)
class CheckpointPlan:
    """How many checkpoints a run writes, how large, and the room for those that lie on the disk at once."""

    folder: str
    written: int
    bytes_each: int
    most_at_once: int
    needed_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a run will do. What cannot be said, because something is missing, is None; `faults` say what would stop it,
    `to_make` what the stages before training have yet to make."""

    name: str
    folder: str
    steps: int
    tokens_per_step: int
    micro_batches: int | None
    cluster: Cluster
    choice: Choice | None
    dp_size: int | None
    parameters: Parameters | None
    estimate: Estimate | None
    corpora: tuple[CorpusPlan, ...]
    learning_rates: tuple[Milestone, ...]
    checkpoints: CheckpointPlan | None
    validations: int
    duration: Duration | None
    to_make: tuple[str, ...]
    faults: tuple[str, ...]


def make_plan(config: RunConfig, cluster: Cluster, base_config: Path | None = None) -> Plan:
    """The plan of `config` on `cluster`; `base_config` stands in for a base that is not here.

    Raises:
        ConfigError: a figure of the cluster cannot be.
    """
    check_cluster(cluster)
    faults = Faults()
    opened = open_run(config, cluster.gpus, faults, base_config)
    estimator, estimate = _estimate(config, opened, cluster, faults)
    checkpoints = _checkpoints(config, estimator, faults) if estimator else None
    corpora = plan_corpora(config, opened.tokenizer, faults)
    to_make = tuple(_to_make(config, faults))
    return Plan(
        name=config.name,
        folder=str(config.folder),
        steps=config.schedule.steps,
        tokens_per_step=config.schedule.global_batch_size * config.data.sequence_length,
        micro_batches=estimate.micro_batches if estimate else None,
        cluster=cluster,
        choice=estimator.own_choice if estimator else None,
        dp_size=opened.layout.dp_size if opened.layout else None,
        parameters=estimator.parameters if estimator else None,
        estimate=estimate,
        corpora=corpora,
        learning_rates=milestones(config),
        checkpoints=checkpoints,
        validations=1 + times(config, config.validation.every_steps),
        duration=duration_of(config, estimate, cluster),
        to_make=to_make,
        faults=tuple(map(str, faults.met)),
    )


def _estimate(
    config: RunConfig, opened: Opened, cluster: Cluster, faults: Faults
) -> tuple[Estimator | None, Estimate | None]:
    """The estimate of the run's own layout, if all that it needs is there; and whether it fits, as a fault if not."""
    if opened.spec is None or opened.deepspeed is None:
        return None, None
    estimator = Estimator(config, opened.spec, opened.deepspeed, cluster)
    estimate = faults.attempt(lambda: estimator.estimate(estimator.own_choice))
    if estimate is not None and not estimate.fits(cluster):
        faults.met.append(
            LayoutError(
                f"memory: a GPU needs {estimate.memory.total / GIB:.1f} GiB of the usable "
                f"{cluster.usable_bytes / GIB:.0f}; tools/estimate.py recommends a layout that fits"
            )
        )
    return estimator, estimate


def _checkpoints(config: RunConfig, estimator: Estimator, faults: Faults) -> CheckpointPlan:
    """What the checkpoints take; that the disk lacks the room is a fault."""
    folder = config.folder / "checkpoints"
    needed = max(0, checkpoints_bytes(config, estimator.parameters) - held_bytes(folder))
    free = free_bytes(folder)
    if free < needed:
        faults.met.append(no_room(folder, needed, free))
    return CheckpointPlan(
        folder=str(folder),
        written=times(config, config.checkpoints.every_steps),
        bytes_each=checkpoint_bytes(estimator.parameters),
        most_at_once=most_checkpoints(config),
        needed_bytes=needed,
        free_bytes=free,
    )


def _to_make(config: RunConfig, faults: Faults) -> Iterator[str]:
    """What a stage before training has yet to make. An initial expansion that is there must be this run's."""
    if not is_tokenized(config.data):
        yield f"{config.data.folder}: the token corpora (tools/preprocess_data.py)"
    if isinstance(config.method, ScaleMethod):
        if not (config.upscaled_folder / expansions.MANIFEST).exists():
            yield f"{config.upscaled_folder}: the initial expansion (tools/upscale.py)"
        else:
            faults.attempt(lambda: open_expansion(config.upscaled_folder))
