"""Kills a function (SIGKILL) before a chosen change that it makes on the disk."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

_CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def outlives(changes: int, work: Callable[..., object], *arguments: object) -> bool:
    """Calls `work` in a child process, which is killed after `changes` changes to files and
    folders,
    before the next.

    Returns whether it finished before that.
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
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code == 0


def _die_after(changes: int) -> None:
    left = changes

    def count(event: str, _: object) -> None:
        nonlocal left
        if event in _CHANGES:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(count)
