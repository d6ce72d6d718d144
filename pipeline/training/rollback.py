"""Back to the last checkpoint before a spike, and on without the samples that led to it."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import log
from pipeline.checkpoint.position import Position, StepRecord
from pipeline.training.divergence import check_skips, end_diverged, set_aside
from pipeline.training.trainer import Trainer
from pipeline.training.unison import warn_in_unison

_logger = log.get_logger(__name__)


def roll_back(trainer: Trainer, position: Position, spike: Sequence[StepRecord]) -> Position:
    """The position that the run goes on from; every rank must call it.

    Raises:
        DivergenceError: it has gone back too often, or there is no checkpoint to go back to.
    """
    config, steps = trainer.config, set_aside(spike)
    said = f"steps {spike[0].step} to {spike[-1].step} are a spike (loss {spike[-1].loss:.4f})"
    if position.rollbacks >= config.stability.max_rollbacks:
        end_diverged(
            config, position, f"{said} after {position.rollbacks} rollbacks, as many as stability.max_rollbacks"
        )
    trainer.checkpoints.finish()
    earlier = trainer.checkpoints.resume(trainer.engine, before=steps.start)
    if earlier is None:
        end_diverged(config, position, f"{said}, and no checkpoint lies before it")
    assert earlier is not None
    warn_in_unison(
        _logger, "%s; goes back to step %d and leaves out steps %d to %d", said, earlier.step, steps[0], steps[-1]
    )
    # The counts and what has been skipped are of the run; the rest is as it was at the checkpoint.
    after = earlier.skipping(*position.skipped_steps, *steps).changed(
        rollbacks=position.rollbacks + 1,
        recomputed_steps=position.recomputed_steps,
        seconds=position.seconds,
    )
    check_skips(config, after)
    trainer.metrics.go_back(after.step)
    return after
