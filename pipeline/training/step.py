"""One optimizer step: computed, computed once more where no number came out, and at last skipped."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline import log
from pipeline.checkpoint.position import Position, StepRecord
from pipeline.data.packing import IGNORED
from pipeline.training.divergence import remembered
from pipeline.training.engine import Engine
from pipeline.training.schedule import learning_rate
from pipeline.training.signals import StopSignals
from pipeline.training.trainer import Trainer
from pipeline.training.unison import summed, warn_in_unison

ATTEMPTS = 2
"""A fault of the hardware passes: the second result is what an undisturbed run has. A fault in the data does not."""
_logger = log.get_logger(__name__)


class Step(NamedTuple):
    """What a step came to.

    Attributes:
        position: where the run stands after it.
        figures: what there is to log of it; a step that was skipped has no loss.
        stop: whether any rank was asked to stop.
    """

    position: Position
    figures: dict[str, float]
    stop: bool


def take_step(trainer: Trainer, position: Position, signals: StopSignals) -> Step:
    """Takes the step that follows `position`; every rank must call it, and all come to the same."""
    number = position.step + 1
    tokens_per_step = trainer.config.schedule.global_batch_size * trainer.config.data.sequence_length
    after = position.changed(step=number, tokens_seen=number * tokens_per_step)
    if number in position.skipped_steps:
        return _skipped(after, stop=False)

    started = time.perf_counter()
    rate = learning_rate(position.step, trainer.config.schedule) * position.learning_rate_factor
    for attempt in range(ATTEMPTS):  # noqa: B007  # the last one counts
        totals = _compute(trainer, position.step, rate, stop=signals.received is not None)
        if trainer.engine.step_applied:
            break
        warn_in_unison(_logger, "step %d: its loss or gradient is not finite, and moves no weight", number)
    seconds = time.perf_counter() - started
    after = after.changed(seconds=position.seconds + seconds)
    if not trainer.engine.step_applied:
        return _skipped(after.skipping(number), stop=totals.stop)

    record = StepRecord(number, totals.nll_per_token, trainer.engine.gradient_norm)
    after = after.changed(recent=remembered(position.recent, record, trainer.config.stability))
    figures = {
        "loss": totals.nll_per_token,
        "learning_rate": rate,
        "gradient_norm": record.gradient_norm,
    } | trainer.instruments.speed(tokens_per_step, seconds)
    if trainer.engine.routed:
        figures["preserved_fraction"] = totals.preserved_fraction
    if attempt > 0:
        after = after.changed(recomputed_steps=position.recomputed_steps + 1)
        figures["recomputed_steps"] = after.recomputed_steps
    trainer.progress.advance(number, figures)
    return Step(after, figures, totals.stop)


def _skipped(after: Position, *, stop: bool) -> Step:
    warn_in_unison(_logger, "step %d: skipped; its samples change nothing", after.step)
    figures = {"skipped_steps": float(sum(one <= after.step for one in after.skipped_steps))}
    if after.rollbacks:
        figures["rollbacks"] = after.rollbacks
    return Step(after, figures, stop)


def _compute(trainer: Trainer, index: int, rate: float, *, stop: bool) -> StepTotals:
    """One attempt at the step that follows `index` steps; it changes the weights where the gradient is finite."""
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
        sums.add(losses.total, batch.targets, losses.preserved)
    with phases("communication"):
        return sums.over_all_ranks(engine, stop=stop)


class StepTotals(NamedTuple):
    """One step over all ranks: the mean nll of the predicted tokens, and whether any rank was asked to stop."""

    nll_per_token: float
    preserved_fraction: float
    stop: bool


class StepSums:
    """Adds up a step's micro-batches on the device; one message and one wait bring all ranks' sums together."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, nll_sum: Tensor, targets: Tensor, preserved: Tensor) -> None:
        """Counts one micro-batch."""
        predicted = targets != IGNORED
        self._sums[0] += nll_sum.detach()
        self._sums[1] += predicted.sum()
        self._sums[2] += (preserved & predicted).sum()

    def over_all_ranks(self, engine: Engine, *, stop: bool) -> StepTotals:
        """The step's totals; every rank must call it, and all get the same."""
        if engine.tensor_parallel.rank != 0:
            self._sums.zero_()  # tensor-parallel neighbours saw the same tokens
        self._sums[3] = float(stop)
        nll_sum, predicted, preserved, stops = summed(self._sums).tolist()
        return StepTotals(nll_sum / max(1.0, predicted), preserved / max(1.0, predicted), stops > 0)
