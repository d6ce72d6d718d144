"""kill -9 at every instant at which a function changes what is on the disk."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

_CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def outlives(changes: int, work: Callable[..., object], *arguments: object) -> bool:
    """Does `work` in a process of its own, which is killed after so many changes to files and folders, before the next.

    Returns whether it came to its end first.
    """
    child = os.fork()
    if child == 0:
        try:
            _die_after(changes)
            work(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    how = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert how in (0, -signal.SIGKILL), how
    return how == 0


def _die_after(changes: int) -> None:
    left = changes

    def count(event: str, _: object) -> None:
        nonlocal left
        if event in _CHANGES:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(count)
