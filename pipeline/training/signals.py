"""Signals that ask for the end: the run saves once more and leaves with a code that says "go on later"."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType

from pipeline.exit_codes import INTERRUPTED

_SAME_KEYSTROKE_S = 0.5
"""A launcher may pass on what the terminal has sent to all."""


class StopSignals:
    """While it is entered, SIGTERM, SIGUSR1 and SIGINT only set `received`; the loop looks at it after every step.

    A handler may interrupt a collective, so it does nothing else. Ctrl-C for the second time ends the process at once.
    """

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._receive) for number in self.signals}
        # Python calls no handler while the main thread waits in a collective, but it writes the number here at once.
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_end_at_second_interrupt, args=(reader,), name="second Ctrl-C", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        self._writer.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)


def _end_at_second_interrupt(numbers: socket.socket) -> None:
    """Reads the signals that arrive until the other end is closed."""
    first: float | None = None
    with numbers:
        while arrived := numbers.recv(1):
            if arrived[0] != signal.SIGINT:
                continue
            now = time.monotonic()
            first = now if first is None else first
            if now - first > _SAME_KEYSTROKE_S:
                print("interrupted again: ends without saving", file=sys.stderr, flush=True)  # noqa: T201  # the last word
                os._exit(INTERRUPTED)
