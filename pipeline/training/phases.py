"""Where a rank is in its work, for its watchdog, and how its time divides, for the metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.profiler import record_function

Phase = Literal["start", "data", "forward", "backward", "step", "communication", "validation", "checkpoint", "other"]
SLOW: tuple[Phase, ...] = ("start", "validation", "checkpoint")
"""Those that read or write much, and may take longer than any part of a step."""


class Place(NamedTuple):
    """A rank's place: how many steps it has finished, its phase, and since when (`time.monotonic()`).

    `entered` counts the changes of phase; ranks at the same point of the program have the same count.
    """

    step: int
    phase: Phase
    since: float
    entered: int


class Phases:
    """The phases of one rank's main thread. What is in none of them is "other", or "start" before the first step.

    An inner phase interrupts the outer one: every second counts once. Any thread may read `place`.

    On a GPU the host runs ahead of its work, so that its clock says nothing about a phase; waiting for the GPU at each
    change of phase would cost more than the figures are worth. So a change records a CUDA event, which the GPU stamps
    when it gets there; the stamps are read after the step, when the loss was waited for anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.place = Place(step=0, phase="start", since=time.monotonic(), entered=0)
        self._device = device
        self._spent: dict[str, float] = defaultdict(float)
        self._marks: list[tuple[Phase, Any]] = [("start", self._moment())]

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """The block is `phase`. After an exception the place stays: that is where it arose."""
        outer = self.place.phase
        self._enter(phase)
        with record_function(phase):  # its name in a trace
            yield
        self._enter(outer)

    def finished(self, step: int) -> None:
        """`step` steps are done, or restored, and a GPU's work was waited for."""
        self.place = self.place._replace(step=step)
        self._enter("other")
        self._add_up()

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase since this was last asked; on a GPU, ask when its work was waited for."""
        self._marks.append((self.place.phase, self._moment()))
        self._add_up()
        spent, self._spent = self._spent, defaultdict(float)
        return dict(spent)

    def _add_up(self) -> None:
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            self._spent[phase] += self._between(begin, end)
        del self._marks[:-1]

    def _enter(self, phase: Phase) -> None:
        self.place = Place(self.place.step, phase, time.monotonic(), self.place.entered + 1)
        self._marks.append((phase, self._moment()))

    def _moment(self) -> Any:  # noqa: ANN401  # a float, or a CUDA event
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:  # noqa: ANN401
        if self._device.type != "cuda":
            return float(end - begin)
        end.synchronize()  # the last one, recorded just now; all others have passed
        return float(begin.elapsed_time(end)) / 1000
