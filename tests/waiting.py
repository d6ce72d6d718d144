"""Waiting for what must come, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""How long a test waits before it calls something missing: only what is broken takes so long."""


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S, every_s: float = 0.2) -> bool:
    """Asks again and again whether `condition` holds; False if it still does not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
