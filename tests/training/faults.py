"""What goes wrong in a step, put into real runs: numbers that are none, and batches that nothing predicts."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.training.runs import prepared, start_deepspeed, train

Fault = Callable[[Tensor], Tensor]
"""What becomes of a micro-batch's summed nll."""


class _NoGradient(torch.autograd.Function):
    """The same value, whose gradient is no number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


def nan_gradient(nll_sum: Tensor) -> Tensor:
    """The loss stays a number."""
    return _NoGradient.apply(nll_sum)


def infinite_loss(nll_sum: Tensor) -> Tensor:
    """The gradient stays one of numbers."""
    return nll_sum + torch.inf


def bad_batch(nll_sum: Tensor) -> Tensor:
    """Text that nothing predicts."""
    return nll_sum * 4


def death(nll_sum: Tensor) -> Tensor:
    """Of the process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return nll_sum


FAULTS: dict[str, Fault] = {
    "nan gradient": nan_gradient,
    "infinite loss": infinite_loss,
    "bad batch": bad_batch,
    "death": death,
}


class Planned(NamedTuple):
    """A fault of the last rank in every micro-batch of `step`, the first `times` that the step is computed.

    Not of step 1, whose batch is read before training to probe the model.
    """

    fault: str
    step: int
    times: int


def train_with(config: Path, *planned: Planned) -> int:
    """Trains a run that meets these faults."""
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        _inject({one.step: one for one in planned})
    return train(config)


def train_without(config: Path, *steps: int) -> None:
    """Trains on a run whose `steps` are set aside from the beginning."""
    start_deepspeed()
    from pipeline.training.launch import StopSignals
    from pipeline.training.loop import train as train_loop

    trainer, position, _ = prepared(config)
    train_loop(trainer, position.skipping(*steps), StopSignals())
    trainer.observers.on_end(finished=True)


def _inject(planned: dict[int, Planned]) -> None:
    from pipeline.training.batches import TrainingBatches
    from pipeline.training.engine import Engine

    of_step, loss = TrainingBatches.of_step, Engine.loss
    computed: Counter[int] = Counter()
    now = 0

    def counted(batches: TrainingBatches, index: int) -> Iterator[Any]:
        nonlocal now
        now = index + 1
        computed[now] += 1
        yield from of_step(batches, index)

    def faulty(engine: Engine, batch: Any) -> Any:
        losses = loss(engine, batch)
        met = planned.get(now)
        if met is not None and computed[now] <= met.times and torch.is_grad_enabled():
            losses = losses._replace(total=FAULTS[met.fault](losses.total))
        return losses

    TrainingBatches.of_step, Engine.loss = counted, faulty
