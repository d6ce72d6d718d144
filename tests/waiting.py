"""Waiting for an event on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""How long a test waits for an event. Nothing takes so long unless it is broken."""


def wait_until(
    condition: Callable[[], bool], timeout_s: float = PATIENCE_S, every_s: float = 0.2
) -> bool:
    """Polls `condition`; returns False if it does not hold after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
