"""When training leaves the road: what is a spike, what is borne, and the report of what was not.

All of it is a function of the run's position, so that a run that goes on decides as one that never stopped.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from pipeline.checkpoint.manifest import Position, StepRecord
from pipeline.config.run import RunConfig, Stability
from pipeline.errors import DivergenceError
from pipeline.files import write_json
from pipeline.parallel.ranks import run_on_all_ranks

REPORT = "divergence.json"


def remembered(recent: Sequence[StepRecord], record: StepRecord, stability: Stability) -> tuple[StepRecord, ...]:
    """`recent` and `record`: what of them the rule for spikes may still need."""
    return (*recent, record)[-(stability.window + stability.spike_steps) :]


def find_spike(recent: Sequence[StepRecord], stability: Stability, gradient_clipping: float) -> list[StepRecord]:
    """The last `spike_steps` steps, if each of them is beyond what the `window` before them leads to expect.

    Beyond is a loss `loss_increase` nats above their median, or a gradient norm that is clipped and
    `gradient_norm_factor` times theirs. A single bad batch is not a spike: the steps after it are like those before.
    """
    before, last = recent[: -stability.spike_steps], list(recent[-stability.spike_steps :])
    if len(before) < stability.window:
        return []
    median = statistics.median
    highest_loss = highest_norm = float("inf")
    if stability.loss_increase is not None:
        highest_loss = median(record.loss for record in before) + stability.loss_increase
    if stability.gradient_norm_factor is not None:
        norm = median(record.gradient_norm for record in before)
        highest_norm = max(gradient_clipping, norm * stability.gradient_norm_factor)
    return last if all(one.loss > highest_loss or one.gradient_norm > highest_norm for one in last) else []


def set_aside(spike: Sequence[StepRecord]) -> range:
    """The steps whose samples are not to be drawn again: those of the spike, and the one whose update began it."""
    return range(spike[0].step - 1, spike[-1].step + 1)


def check_skips(config: RunConfig, position: Position) -> None:
    """Ends a run that skipped more steps than its configuration bears; every rank must call it.

    Raises:
        DivergenceError: on the first rank; the others leave without a word.
    """
    skipped, most = len(position.skipped_steps), config.stability.max_skipped_steps
    if skipped > most:
        end_diverged(config, position, f"{skipped} steps were skipped, more than stability.max_skipped_steps {most}")


def end_diverged(config: RunConfig, position: Position, reason: str) -> None:
    """Raises DivergenceError on the first rank, once the figures of the last steps are in the run folder."""

    def report() -> None:
        path = config.folder / REPORT
        if dist.get_rank() == 0:
            write_report(path, config, position, reason)
        raise DivergenceError(
            f"step {position.step}: {reason}; nothing was saved since the last checkpoint, from which the same command "
            f"goes on; lower schedule.learning_rate, or look at these steps' samples: {path} has the figures"
        )

    run_on_all_ranks(report)


def write_report(path: Path, config: RunConfig, position: Position, reason: str) -> None:
    """What a person needs who asks why the run ended."""
    values = {
        "step": position.step,
        "reason": reason,
        "skipped_steps": list(position.skipped_steps),
        "recomputed_steps": position.recomputed_steps,
        "rollbacks": position.rollbacks,
        "learning_rate_factor": position.learning_rate_factor,
        "settings": config.stability.model_dump(mode="json"),
        "recent": [record._asdict() for record in position.recent],
    }
    write_json(path, values)
