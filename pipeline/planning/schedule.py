"""When a run does what: the turning points of its learning rate, its checkpoints and validations, its end."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from pipeline.config.run import RunConfig
from pipeline.estimation.cluster import Cluster
from pipeline.estimation.estimate import Estimate
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.training.schedule import learning_rate

_LATEST_STEPS = 100
_SPEED = "tokens_per_second_per_gpu"


@dataclass(frozen=True)
class Milestone:
    """The learning rate of the step that follows `step` steps already taken."""

    step: int
    learning_rate: float
    what: str


def milestones(config: RunConfig) -> tuple[Milestone, ...]:
    """The turning points of the learning rate."""
    schedule = config.schedule
    warmup = math.ceil(schedule.warmup_fraction * schedule.steps)
    falls_at = warmup
    if schedule.decay == "wsd":
        falls_at = max(warmup, schedule.steps - math.ceil(schedule.decay_fraction * schedule.steps))
    points = {0: "first step", warmup: "warm-up ends", falls_at: f"{schedule.decay} decay begins"}
    if warmup == falls_at:
        points[warmup] = f"warm-up ends, {schedule.decay} decay begins"
    points[schedule.steps - 1] = "last step"
    return tuple(Milestone(step, learning_rate(step, schedule), what) for step, what in sorted(points.items()))


def times(config: RunConfig, every_steps: int) -> int:
    """How often something is done that comes every so many steps and at the end."""
    return math.ceil(config.schedule.steps / every_steps)


@dataclass(frozen=True)
class Duration:
    """How long the steps that are left will take, validations and saves not counted, and what that is said from."""

    steps_done: int
    step_s: float
    left_s: float
    source: str


def duration_of(config: RunConfig, estimate: Estimate | None, cluster: Cluster) -> Duration | None:
    """From what the run folder's metrics have measured, else from the estimate; None where there is neither."""
    lines = [line for line in read_metrics(config.folder / METRICS) if _SPEED in line]
    steps_done = int(lines[-1]["step"]) if lines else 0
    left = max(0, config.schedule.steps - steps_done)
    if lines:
        speed = statistics.median(line[_SPEED] for line in lines[-_LATEST_STEPS:])
        tokens_per_step = config.schedule.global_batch_size * config.data.sequence_length
        step_s = tokens_per_step / (speed * cluster.gpus)
        return Duration(steps_done, step_s, left * step_s, f"{speed:,.0f} tokens/s a GPU, measured in {METRICS}")
    if estimate is None:
        return None
    source = f"{cluster.peak_tflops:g} TFLOP/s a GPU at MFU {cluster.mfu:g}, and the estimate's messages"
    return Duration(0, estimate.step_s, left * estimate.step_s, source)
