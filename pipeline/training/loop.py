"""The training loop: steps, validations, checkpoints, and the rollback after a spike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import log
from pipeline.checkpoint.manifest import Position, StepRecord
from pipeline.config.run import RunConfig
from pipeline.config.schedule import learning_rate
from pipeline.data.packing import IGNORED
from pipeline.health.liveness import Phases
from pipeline.model.output import Losses
from pipeline.parallel.ranks import raise_on_all_ranks, summed, warn_on_rank0
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpointing import Checkpoints
from pipeline.training.divergence import check_skipped_steps, end_diverged, find_spike, remembered
from pipeline.training.engine import Engine
from pipeline.training.launch import StopSignals
from pipeline.training.observer import Observers, StepEvent, ValidationEvent
from pipeline.training.validation import HeldoutScore, Validation

ATTEMPTS = 2
"""How often a step is computed at most: a transient hardware fault is gone the second time, a fault in the data not."""
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Trainer:
    """The parts of a run that is about to start or to resume."""

    config: RunConfig
    engine: Engine
    batches: TrainingBatches
    validation: Validation
    checkpoints: Checkpoints
    observers: Observers
    phases: Phases


class Outcome(NamedTuple):
    """Where the loop ended; `finished`: at the last step, or early because nothing more was gained."""

    position: Position
    scores: dict[str, HeldoutScore]
    finished: bool


def train(trainer: Trainer, position: Position, signals: StopSignals) -> Outcome:
    """Trains from `position` to the last step, or to the step during which a signal came, which it then saves.

    Raises:
        UserError: training diverged or forgot too much, or the last save failed; on rank 0, SystemExit on the others.
    """
    config, schedule, phases, observers = trainer.config, trainer.config.schedule, trainer.phases, trainer.observers
    phases.finished(position.step)
    position, scores = validate_ends(trainer, position)
    while not position.is_end_of(config):
        step = take_step(trainer, position, signals)
        position, figures, texts = step.position, step.figures, {}
        phases.finished(position.step)
        check_skipped_steps(config, position)
        if spike := find_spike(position.recent, config.stability, schedule.gradient_clipping):
            with phases("checkpoint"):
                position = roll_back(trainer, position, spike)
            continue

        last, forgot = position.step == schedule.steps, None
        if last or position.step % config.validation.every_steps == 0:
            with phases("validation"):
                scores = trainer.validation.run(trainer.engine)
                texts = trainer.validation.continued_prompts(trainer.engine)
                validation = ValidationEvent(position, scores, score_figures(scores))
                observers.on_validation(validation)
            position, forgot = validation.position, validation.stop
            last = position.is_end_of(config)
            figures |= validation.figures
        if failed := trainer.checkpoints.failed_saves:
            figures["failed_saves"] = failed
        observers.on_step(StepEvent(position.step, tokens_per_step(config), step.seconds, figures, texts))

        leaving = last or step.stop or forgot is not None
        if leaving or position.step % config.checkpoints.every_steps == 0:
            with phases("checkpoint"):
                trainer.checkpoints.save(trainer.engine, position, last=leaving)
        if forgot is not None and not last:
            raise_on_all_ranks(forgot)
        if last or step.stop:
            return Outcome(position, scores, finished=last)
    return Outcome(position, scores, finished=True)


def validate_ends(trainer: Trainer, position: Position) -> tuple[Position, dict[str, HeldoutScore]]:
    """Scores the model before its first step (the reference for forgetting), or where no step is left."""
    if position.step > 0 and not position.is_end_of(trainer.config):
        return position, {}
    with trainer.phases("validation"):
        scores = trainer.validation.run(trainer.engine)
    if position.step == 0:
        texts = trainer.validation.continued_prompts(trainer.engine)
        trainer.observers.on_step(StepEvent(0, 0, None, score_figures(scores), texts))
        position = position.changed(initial_nll_per_token={name: score.nll_per_token for name, score in scores.items()})
    return position, scores


def score_figures(scores: dict[str, HeldoutScore]) -> dict[str, float]:
    """The scores by their names in metrics.jsonl."""
    return {f"{figure}/{name}": value for name, score in scores.items() for figure, value in score.figures().items()}


def tokens_per_step(config: RunConfig) -> int:
    """Over all ranks, padding and prompts included."""
    return config.schedule.global_batch_size * config.data.sequence_length


class Step(NamedTuple):
    """The result of a step.

    Attributes:
        position: where the run stands after it.
        figures: the values to log; a skipped step has no loss.
        seconds: how long it took; None where it was skipped.
        stop: whether any rank was asked to stop.
    """

    position: Position
    figures: dict[str, float]
    seconds: float | None
    stop: bool


def take_step(trainer: Trainer, position: Position, signals: StopSignals) -> Step:
    """Takes the step after `position`; every rank must call it, and all get the same result.

    A step whose loss or gradient is not finite is computed once more, then skipped.
    """
    number = position.step + 1
    after = position.changed(step=number, tokens_seen=number * tokens_per_step(trainer.config))
    if number in position.skipped_steps:
        return _skipped(after, stop=False)

    started = time.perf_counter()
    rate = learning_rate(position.step, trainer.config.schedule) * position.learning_rate_factor
    for attempt in range(ATTEMPTS):  # noqa: B007  # used below
        totals = _compute(trainer, position.step, rate, stop=signals.received is not None)
        if totals.applied:
            break
        warn_on_rank0(_logger, "step %d: its loss or gradient is not finite; no weight was changed", number)
    seconds = time.perf_counter() - started
    after = after.changed(seconds=position.seconds + seconds)
    if not totals.applied:
        return _skipped(after.skipping(number), stop=totals.stop)

    figures: dict[str, float] = {}
    if totals.nll_per_token is not None:  # a small batch may be rehearsed as a whole
        figures["loss"] = totals.nll_per_token
        record = StepRecord(number, totals.nll_per_token, totals.gradient_norm)
        after = after.changed(recent=remembered(position.recent, record, trainer.config.stability))
    figures |= {"learning_rate": rate, "gradient_norm": totals.gradient_norm}
    if totals.kl_per_token is not None:
        figures["kl_rehearsal"] = totals.kl_per_token
    if trainer.engine.routed:
        figures["preserved_fraction"] = totals.preserved_fraction
    if attempt > 0:
        after = after.changed(recomputed_steps=position.recomputed_steps + 1)
        figures["recomputed_steps"] = after.recomputed_steps
    return Step(after, figures, seconds, totals.stop)


def _skipped(after: Position, *, stop: bool) -> Step:
    warn_on_rank0(_logger, "step %d: skipped; no weight was changed", after.step)
    figures = {"skipped_steps": float(sum(step <= after.step for step in after.skipped_steps))}
    if after.rollbacks:
        figures["rollbacks"] = after.rollbacks
    return Step(after, figures, None, stop)


def _compute(trainer: Trainer, index: int, rate: float, *, stop: bool) -> StepTotals:
    """Computes the step after `index` steps once; it changes the weights if the gradient is finite."""
    engine, phases, sums = trainer.engine, trainer.phases, StepSums(trainer.batches.device)
    batches = iter(trainer.batches.of_step(index))
    while True:
        with phases("data"):
            batch = next(batches, None)
        if batch is None:
            break
        with phases("forward"):
            losses = engine.loss(batch)
        with phases("backward"):
            engine.backward(losses.total)
        with phases("step"):
            engine.step(rate)
        sums.add(losses, batch.targets, batch.kl_rows)
    with phases("communication"):
        return sums.over_all_ranks(engine, stop=stop)


class StepTotals(NamedTuple):
    """A step over all ranks.

    Attributes:
        nll_per_token: the mean over predicted tokens, without rehearsed ones; None without any.
        kl_per_token: the mean KL(base || model) over rehearsed tokens; None without any.
        preserved_fraction: the share of all these tokens that took Route's preserved path.
        stop: whether any rank was asked to stop.
        gradient_norm: rank 0's global norm before clipping; every decision is made from the same number.
        applied: whether the weights changed.
    """

    nll_per_token: float | None
    kl_per_token: float | None
    preserved_fraction: float
    stop: bool
    gradient_norm: float
    applied: bool


class StepSums:
    """Adds up a step's micro-batches on the device; one collective and one wait bring all ranks' sums together."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(8, dtype=torch.float64, device=device)

    def add(self, losses: Losses, targets: Tensor, kl_rows: int) -> None:
        """Adds a micro-batch of targets [B, S], of which the first `kl_rows` sequences are rehearsed."""
        predicted = targets != IGNORED
        self._sums[0] += losses.nll.sum()
        self._sums[1] += predicted[kl_rows:].sum()
        self._sums[2] += losses.kl.sum()
        self._sums[3] += predicted[:kl_rows].sum()
        self._sums[4] += (losses.preserved & predicted).sum()

    def over_all_ranks(self, engine: Engine, *, stop: bool) -> StepTotals:
        """The step's totals; every rank must call it, and all get the same result."""
        if engine.tensor_parallel.rank != 0:
            self._sums.zero_()  # tensor-parallel neighbours read the same tokens
        self._sums[5] = float(stop)
        if dist.get_rank() == 0:
            self._sums[6], self._sums[7] = engine.gradient_norm, engine.step_applied
        nll, predicted, kl, rehearsed, preserved, stops, norm, applied = summed(self._sums).tolist()
        return StepTotals(
            nll_per_token=nll / predicted if predicted else None,
            kl_per_token=kl / rehearsed if rehearsed else None,
            preserved_fraction=preserved / max(1.0, predicted + rehearsed),
            stop=stops > 0,
            gradient_norm=norm,
            applied=applied > 0,
        )


def roll_back(trainer: Trainer, position: Position, spike: Sequence[StepRecord]) -> Position:
    """Restores the newest checkpoint before `spike`, and returns the position from which its samples are skipped.

    Every rank must call it.

    Raises:
        DivergenceError: too many rollbacks, or no checkpoint to restore; on rank 0, SystemExit on the others.
    """
    config = trainer.config
    skipped = range(spike[0].step - 1, spike[-1].step + 1)  # also the step whose update began it
    found = f"steps {spike[0].step} to {spike[-1].step} are a spike (loss {spike[-1].loss:.4f})"
    if (count := position.rollbacks) >= config.stability.max_rollbacks:
        end_diverged(config, position, f"{found} after {count} rollbacks, as many as stability.max_rollbacks")
    trainer.checkpoints.finish()
    earlier = trainer.checkpoints.resume(trainer.engine, before=skipped.start)
    if earlier is None:
        end_diverged(config, position, f"{found}, and no checkpoint lies before it")
    message = "%s; rolling back to step %d and skipping steps %d to %d"
    warn_on_rank0(_logger, message, found, earlier.step, skipped[0], skipped[-1])
    # The counts and the skipped steps are the whole run's; everything else is the checkpoint's.
    after = earlier.skipping(*position.skipped_steps, *skipped).changed(
        rollbacks=position.rollbacks + 1,
        recomputed_steps=position.recomputed_steps,
        seconds=position.seconds,
    )
    check_skipped_steps(config, after)
    trainer.checkpoints.record_rollback(after)
    trainer.observers.on_rollback(after.step)
    return after
