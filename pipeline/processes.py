"""Processes on Linux: which machine they are on, whether they live, and what ends them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from functools import lru_cache
from pathlib import Path

_UTF8_MODE = "PYTHONUTF8"
_PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that names the signal."""


def use_utf8() -> None:
    """Starts this program again in Python's UTF-8 mode if the locale has another encoding.

    In such a locale, as C is, file names that are not ASCII could not be recorded, or would be
    recorded as other names than in a UTF-8 locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_UTF8_MODE) != "1":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _UTF8_MODE: "1"})


@lru_cache(maxsize=1)
def machine_id() -> str:
    """Identifies the machine within which a process id means one process.

    It is the id of the last boot and of this process's PID namespace: host names need not be
    unique, and each container on a host has process ids of its own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def stop_with_parent(parent: int) -> None:
    """Has the kernel send SIGTERM to this process when its parent ends, in whatever way.

    Without it, a parent that SIGKILL ends leaves its children behind. On other systems than Linux
    nothing happens.

    Args:
        parent: the process id of the parent, which may have ended already.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # A parent that ended before the call above sends no signal any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def process_exists(pid: int) -> bool:
    """Whether there is a process of this number, of any user.

    The signal 0 finds it even where /proc hides other users' processes (hidepid).
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
