"""A disk that is full or read-only, a small tmpfs and a file that fills it; and one without hard
links."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import subprocess
from pathlib import Path

import pytest

_BALLAST = "ballast"


class SmallDisk:
    """A tmpfs mounted at `path`."""

    def __init__(self, path: Path, mib: int) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)],
            capture_output=True,
            check=False,
        )
        if mounted.returncode != 0:
            pytest.skip("mounting a small disk needs root")

    def fill(self) -> None:
        fill(self.path)

    def free(self) -> None:
        free(self.path)

    def grow(self, mib: int) -> None:
        """Changes its size."""
        subprocess.run(["mount", "-o", f"remount,size={mib}m", str(self.path)], check=True)

    def make_read_only(self) -> None:
        """Nothing on it can be written from now on, not by root either."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)

    def remove(self) -> None:
        """Unmounts it."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def fill(disk: Path) -> None:
    """Takes all space that is left."""
    with (disk / _BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(os.sysconf("SC_PAGESIZE")))


def free(disk: Path) -> None:
    """Releases the space that `fill` took."""
    (disk / _BALLAST).unlink()


# The numbers of these calls, and of the architecture for the kernel's filter.
_CALLS = {
    "x86_64": {"link": 86, "linkat": 265, "renameat2": 316},
    "aarch64": {"linkat": 37, "renameat2": 276},
}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000


def refuse_calls(refusals: dict[str, int]) -> None:
    """Lets the kernel refuse system calls of this process, for good, each with its error number.

    So does a file system without hard links; mounting one takes a driver that not every kernel has.
    """
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        pytest.skip(f"no numbers of system calls for {platform.machine()}")
    program = [(_LOAD, 0, 0, 0)]
    for name, error in refusals.items():
        if name in numbers:
            program.append((_JUMP_IF_EQUAL, 0, 1, numbers[name]))
            program.append((_RETURN, 0, 0, _FAIL_WITH | error))
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    library = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_filter, filter_mode = 38, 22, 2
    assert library.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert library.prctl(set_filter, filter_mode, header, 0, 0) == 0, os.strerror(
        ctypes.get_errno()
    )


NO_HARD_LINKS = {"link": errno.EOPNOTSUPP, "linkat": errno.EOPNOTSUPP}
NO_SAFE_RENAME = {**NO_HARD_LINKS, "renameat2": errno.EINVAL}
"""Nor a rename that does not replace."""
