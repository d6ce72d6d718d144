"""The training loop."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.checkpoint.position import Position
from pipeline.training.divergence import check_skips, find_spike
from pipeline.training.forgetting import end_forgetful, forgetting_figures, heed_budget
from pipeline.training.rollback import roll_back
from pipeline.training.signals import StopSignals
from pipeline.training.step import take_step
from pipeline.training.trainer import Trainer
from pipeline.training.validation import HeldoutScore


class Outcome(NamedTuple):
    """How far the loop came. `scores` are those of the last validation; `finished` is false after a signal."""

    position: Position
    scores: dict[str, HeldoutScore]
    finished: bool


def train(trainer: Trainer, position: Position, signals: StopSignals) -> Outcome:
    """Trains from `position` to the last step, or to the step during which a signal came; the work is saved then.

    Raises:
        UserError: training diverged, forgot too much, or could not save its end; on the first rank.
    """
    config, schedule, phases = trainer.config, trainer.config.schedule, trainer.phases
    position, scores = begin(trainer, position)
    while position.step < schedule.steps:
        with trainer.profiler(position.step + 1):
            step = take_step(trainer, position, signals)
        position, figures = step.position, step.figures
        phases.finished(position.step)
        check_skips(config, position)
        if spike := find_spike(position.recent, config.stability, schedule.gradient_clipping):
            with phases("checkpoint"):
                position = roll_back(trainer, position, spike)
            continue

        last = position.step == schedule.steps
        reason_to_stop = None
        if last or position.step % config.validation.every_steps == 0:
            with phases("validation"):
                scores, looked = look(trainer, position)
            position, reason_to_stop = heed_budget(looked, position, config.forgetting)
            figures |= looked
        trainer.metrics.write(position.step, figures | trainer.checkpoints.figures() | trainer.instruments.readings())

        leaving = last or step.stop or reason_to_stop is not None
        if leaving or position.step % config.checkpoints.every_steps == 0:
            with phases("checkpoint"):
                trainer.checkpoints.save(trainer.engine, position, last=leaving)
        if reason_to_stop is not None and not last:
            end_forgetful(position, reason_to_stop)
        if step.stop and not last:
            return Outcome(position, scores, finished=False)
    return Outcome(position, scores, finished=True)


def begin(trainer: Trainer, position: Position) -> tuple[Position, dict[str, HeldoutScore]]:
    """Scores the model before its first step, from where forgetting is measured, or again after its last."""
    trainer.phases.finished(position.step)
    if position.step not in (0, trainer.config.schedule.steps):
        return position, {}
    with trainer.phases("validation"):
        scores = trainer.validation.run(trainer.engine)
    if position.step == 0:
        trainer.metrics.write(0, score_figures(scores) | trainer.instruments.readings())
        position = position.changed(initial_nll_per_token={name: one.nll_per_token for name, one in scores.items()})
    return position, scores


def look(trainer: Trainer, position: Position) -> tuple[dict[str, HeldoutScore], dict[str, float]]:
    """What the model knows and has forgotten, and how far it is from its base."""
    scores = trainer.validation.run(trainer.engine)
    forgetting = forgetting_figures(scores, position, trainer.config)
    return scores, score_figures(scores) | forgetting | trainer.diagnostics.run(trainer.engine)


def score_figures(scores: dict[str, HeldoutScore]) -> dict[str, float]:
    """The scores under the names they have in TensorBoard."""
    return {f"{figure}/{name}": value for name, score in scores.items() for figure, value in score.figures().items()}
