"""A terminal in which a program runs: what it shows, and the keys that a test presses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.waiting import PATIENCE_S

CTRL_C = "\x03"
CTRL_BACKSLASH = "\x1c"


class Terminal:
    """The other end of a pseudoterminal, in whose foreground a program runs."""

    def __init__(self, descriptor: int, pid: int) -> None:
        self._descriptor = descriptor
        self._pid = pid
        self.written = ""
        """All that the program wrote so far."""

    def press(self, key: str) -> None:
        os.write(self._descriptor, key.encode())

    def wait_for(self, text: str) -> None:
        """Reads until the program has written `text`."""
        found = self._read_until(lambda: text in self.written)
        assert found, f"no {text!r} in {self.written!r}"

    def hang_up(self) -> None:
        """Closes the terminal, as when its window is closed."""
        os.close(self._descriptor)
        self._descriptor = -1

    def end(self) -> int:
        """Waits for the end of the program; returns its exit code."""
        if self._descriptor >= 0:
            assert self._read_until(lambda: False) is False
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        if self._descriptor >= 0:
            os.close(self._descriptor)

    @property
    def screen(self) -> list[str]:
        """What the terminal shows of it: carriage returns and erased lines are carried out."""
        return [shown(line) for line in self.written.replace("\r\n", "\n").split("\n")]

    def _read_until(self, condition: Callable[[], bool]) -> bool:
        """Reads until the condition holds; False where the program ended before."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.written
            if not select.select([self._descriptor], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._descriptor, 2**16)
            except OSError:  # the last process that had it open has ended
                return False
            self.written += data.decode(errors="replace")
        return True


def shown(line: str) -> str:
    """One line of a terminal after its carriage returns and "erase to the end of the line"."""
    cells: list[str] = []
    for number, part in enumerate(line.split("\r")):
        column = 0 if number else len(cells)
        for piece_number, piece in enumerate(part.split("\x1b[K")):
            if piece_number:
                del cells[column:]
            cells[column : column + len(piece)] = piece
            column += len(piece)
    return "".join(cells).rstrip()


@contextlib.contextmanager
def terminal(
    command: list[str], env: Mapping[str, str], cwd: Path, columns: int = 110
) -> Iterator[Terminal]:
    """Runs a command in the foreground of a terminal; it is killed at the end of the block if it
    still runs."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(command[0], command, dict(env))
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    opened = Terminal(descriptor, pid)
    try:
        yield opened
    finally:
        opened.close()
