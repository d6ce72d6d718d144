"""Signals that ask for the end: the run saves once more and leaves with a code that says "go on later"."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

RESUME_LATER = 75
"""The exit code of a run that saved its work and is not finished (`sysexits.h`: a temporary failure)."""


class StopSignals:
    """While it is entered, SIGTERM, SIGUSR1 and SIGINT only set `received`; the loop looks at it after every step.

    A handler may interrupt a collective, so it does nothing else.
    """

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._receive) for number in self.signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
