"""What the main thread of a rank is doing, for metrics, traces and the watchdog."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.profiler import record_function

Phase = Literal[
    "start",
    "data",
    "forward",
    "backward",
    "step",
    "communication",
    "validation",
    "checkpoint",
    "other",
]
SLOW: tuple[Phase, ...] = ("start", "validation", "checkpoint")
"""I/O-bound phases, which may take longer than any part of a step."""


class PhaseState(NamedTuple):
    """Where the main thread of a rank is.

    Attributes:
        step: the number of finished steps.
        since: when it entered `phase`, by `time.monotonic()`.
        entered: how often it has changed its phase so far.
    """

    step: int
    phase: Phase
    since: float
    entered: int


class Phases:
    """The phases of one rank's main thread: `with phases("forward"): ...`.

    Any thread may read `state`. Time outside of all phases is "other", or "start" before the first
    step. An inner phase interrupts the outer one, so that every second counts once. On a GPU a
    change of phase records a CUDA event instead of the host's clock, because the host runs ahead of
    the GPU. The events are read after the step, when the host has waited for the loss anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = PhaseState(step=0, phase="start", since=time.monotonic(), entered=0)
        self._device = device
        self._spent: dict[str, float] = defaultdict(float)
        self._marks: list[tuple[Phase, Any]] = [("start", self._now())]

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Runs the block as `phase`.

        After an exception the phase stays, to show where the exception was raised.
        """
        # No try: after an exception the phase must stay.
        outer = self.state.phase
        self._enter(phase)
        with record_function(phase):  # names it in a trace
            yield
        self._enter(outer)

    def finished(self, step: int) -> None:
        """Records that `step` steps are finished or restored; the GPU must be synchronized."""
        self.state = self.state._replace(step=step)
        self._enter("other")
        self._add_up()

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase since the last call; a GPU must be synchronized."""
        self._marks.append((self.state.phase, self._now()))
        self._add_up()
        spent = dict(self._spent)
        self._spent.clear()
        return spent

    def _add_up(self) -> None:
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            self._spent[phase] += self._seconds_between(begin, end)
        del self._marks[:-1]

    def _enter(self, phase: Phase) -> None:
        self.state = PhaseState(self.state.step, phase, time.monotonic(), self.state.entered + 1)
        self._marks.append((phase, self._now()))

    def _now(self) -> Any:
        """The host's time in seconds, or on a GPU a CUDA event that is recorded now."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_between(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin)
        # The GPU has passed all events but the last one, which was recorded just now.
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
