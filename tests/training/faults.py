"""Faults of a step, injected into real runs: losses and gradients that are not finite, and
unpredictable batches.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from tests.training.runs import prepared, train, trained

Fault = Callable[[Tensor], Tensor]
"""Maps a micro-batch's loss, summed or of each token, to a faulty one."""


def nan_gradient(nll_sum: Tensor) -> Tensor:
    """The gradient is NaN, the loss finite."""
    faulty = nll_sum.clone()
    if faulty.requires_grad:
        faulty.register_hook(lambda gradient: gradient * torch.nan)
    return faulty


def infinite_loss(nll_sum: Tensor) -> Tensor:
    """The loss is infinite, the gradient finite."""
    return nll_sum + torch.inf


def bad_batch(nll_sum: Tensor) -> Tensor:
    """A batch of text that the model cannot predict."""
    return nll_sum * 4


def death(nll_sum: Tensor) -> Tensor:
    """The process is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    return nll_sum


FAULTS: dict[str, Fault] = {
    "nan gradient": nan_gradient,
    "infinite loss": infinite_loss,
    "bad batch": bad_batch,
    "death": death,
}


class Planned(NamedTuple):
    """A fault on the last rank in every micro-batch of `step`, the first `times` that the step is
    computed.

    Not of step 1, whose batch is read before training to probe the model.
    """

    fault: str
    step: int
    times: int


def train_with(config: Path, *planned: Planned) -> int:
    """Trains a run with these faults."""
    is_faulty = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    with _injected({fault.step: fault for fault in planned}) if is_faulty else nullcontext():
        return train(config)


def train_without(config: Path, *steps: int) -> None:
    """Trains a run that skips `steps` from the start."""
    trainer = prepared(config)
    trainer.position = trainer.position.skipping(*steps)
    trained(trainer)


@contextmanager
def _injected(planned: dict[int, Planned]) -> Iterator[None]:
    from pipeline.training.batches import TrainingBatches
    from pipeline.training.engine import Engine

    micro_batches, loss = TrainingBatches.micro_batches, Engine.loss
    computed: Counter[int] = Counter()
    now = 0

    def counted(batches: TrainingBatches, index: int) -> Iterator[Any]:
        nonlocal now
        now = index + 1
        computed[now] += 1
        yield from micro_batches(batches, index)

    def faulty(engine: Engine, batch: Any) -> Any:
        losses = loss(engine, batch)
        met = planned.get(now)
        if met is not None and computed[now] <= met.times and torch.is_grad_enabled():
            fault = FAULTS[met.fault]
            losses = losses._replace(total=fault(losses.total), nll=fault(losses.nll))
        return losses

    with (
        patch.object(TrainingBatches, "micro_batches", counted),
        patch.object(Engine, "loss", faulty),
    ):
        yield
