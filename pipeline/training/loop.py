"""The training loop, and what it adds up over a step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.manifest import Position
from pipeline.config import RunConfig
from pipeline.data.packing import IGNORED
from pipeline.errors import DivergenceError
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.diagnostics import Diagnostics
from pipeline.training.engine import Engine
from pipeline.training.metrics import Metrics
from pipeline.training.progress import Progress
from pipeline.training.schedule import learning_rate
from pipeline.training.signals import StopSignals
from pipeline.training.unison import in_unison
from pipeline.training.validation import HeldoutScore, Validation


@dataclass(frozen=True)
class Trainer:
    """What the loop drives."""

    config: RunConfig
    engine: Engine
    batches: TrainingBatches
    validation: Validation
    diagnostics: Diagnostics
    metrics: Metrics
    checkpoints: Checkpoints
    progress: Progress


class Outcome(NamedTuple):
    """How far the loop came. `scores` are those of the last validation; `finished` is false after a signal."""

    position: Position
    scores: dict[str, HeldoutScore]
    finished: bool


def train(trainer: Trainer, position: Position, signals: StopSignals) -> Outcome:
    """Trains from `position` to the last step, or to the step during which a signal came; the work is saved then."""
    config, engine, schedule = trainer.config, trainer.engine, trainer.config.schedule
    tokens_per_step = schedule.global_batch_size * config.data.sequence_length
    scores = trainer.validation.run(engine) if position.step in (0, schedule.steps) else {}
    if position.step == 0:
        trainer.metrics.write(0, validation_figures(scores))

    for step in range(position.step, schedule.steps):
        started = time.perf_counter()
        rate = learning_rate(step, schedule)
        sums = StepSums(trainer.batches.device)
        for batch in trainer.batches.of_step(step):
            nll_sum, _, preserved = engine.loss(batch)
            engine.backward(nll_sum)
            engine.step(rate)
            sums.add(nll_sum, batch.targets, preserved)
        totals = sums.over_all_ranks(engine, stop=signals.received is not None)
        if not math.isfinite(totals.nll_per_token):
            in_unison(lambda: refuse_to_go_on(step + 1, totals.nll_per_token))  # noqa: B023  # called at once
        seconds = time.perf_counter() - started

        done = step + 1
        last = done == schedule.steps
        position = Position(step=done, tokens_seen=done * tokens_per_step, seconds=position.seconds + seconds)
        trainer.progress.advance(done, totals.nll_per_token, rate)
        figures = {
            "loss": totals.nll_per_token,
            "learning_rate": rate,
            "gradient_norm": engine.gradient_norm,
            "tokens_per_second_per_gpu": tokens_per_step / seconds / dist.get_world_size(),
        }
        if engine.routed:
            figures["preserved_fraction"] = totals.preserved_fraction
        if last or done % config.validation.every_steps == 0:
            scores = trainer.validation.run(engine)
            figures |= validation_figures(scores) | trainer.diagnostics.run(engine)
        trainer.metrics.write(done, figures)
        if last or totals.stop or done % config.checkpoints.every_steps == 0:
            trainer.checkpoints.save(engine, position)
        if last or totals.stop:
            trainer.checkpoints.finish()
        if totals.stop and not last:
            return Outcome(position, scores, finished=False)
    return Outcome(position, scores, finished=True)


def refuse_to_go_on(step: int, loss: float) -> None:
    """Raises DivergenceError: DeepSpeed skips such a step's update without a word, and the next is no better."""
    raise DivergenceError(
        f"step {step}: the loss is {loss}; nothing was saved since the last checkpoint, from which the same command "
        "goes on; lower schedule.learning_rate, or look at this step's data"
    )


def validation_figures(scores: dict[str, HeldoutScore]) -> dict[str, float]:
    """The scores under the names they have in TensorBoard."""
    return {f"perplexity/{name}": score.perplexity for name, score in scores.items()} | {
        f"bits_per_byte/{name}": score.bits_per_byte for name, score in scores.items()
    }


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
        dist.all_reduce(self._sums)
        nll_sum, predicted, preserved, stops = self._sums.tolist()
        return StepTotals(nll_sum / max(1.0, predicted), preserved / max(1.0, predicted), stops > 0)
