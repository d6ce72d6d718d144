"""Starts one process per rank on this machine, forwards signals to them, and ends all of them.

    python -m pipeline.local_ranks 2 -m pipeline train configs/demo.yaml

Why not torchrun: it exits with 1 whatever its ranks' exit codes are, waits half a minute for a
stopped rank, and starts each rank in a session of its own, where it survives when torchrun is
killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType

from pipeline import log
from pipeline.processes import stop_with_parent

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_POLL_EVERY_S = 0.1
_logger = log.get_logger(__name__)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the system assigns to no other program during the block.

    It is bound without listening: a program that listens with SO_REUSEADDR, as torch's store does,
    can still use it.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as held:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def run_ranks(command: Sequence[str], count: int) -> int:
    """Runs `command`, Python's arguments, as `count` ranks; returns their highest exit code.

    After the first rank has ended, the others have EXIT_GRACE_S seconds of the environment, or 15,
    before they are killed, stopped ones included. Signals to this process are forwarded to all
    ranks.

    A rank that a signal ended counts as 128 + the signal's number. An abort after another rank has
    failed does not count: NCCL aborts where a peer is gone.
    """
    with ExitStack() as started:
        port = started.enter_context(reserved_port())
        ranks: list[subprocess.Popen[bytes]] = []
        # However this function ends, no rank outlives it.
        started.callback(_kill, ranks)
        started.enter_context(_forwarded_signals(ranks))
        for rank in range(count):
            environment = dict(os.environ)
            environment["RANK"] = str(rank)
            environment["LOCAL_RANK"] = str(rank)
            environment["WORLD_SIZE"] = str(count)
            environment["MASTER_ADDR"] = "127.0.0.1"
            environment["MASTER_PORT"] = str(port)
            # In this process's group: Ctrl-C in a terminal reaches all of them, and a kill of the
            # group leaves none.
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env=environment,
                    # SIGKILL ends this process without a trap: its ranks then get SIGTERM, at
                    # which they save and end.
                    preexec_fn=partial(stop_with_parent, os.getpid()),
                )
            )
        # The watchdog of the other ranks ends them within seconds; what is left then hangs in a
        # system call.
        grace_s = float(os.environ.get("EXIT_GRACE_S", "15"))
        return _wait_for_ranks(ranks, grace_s)


def _wait_for_ranks(ranks: list[subprocess.Popen[bytes]], grace_s: float) -> int:
    """Waits for all ranks, and kills those that do not end within `grace_s` of the first.

    Returns their highest exit code.
    """
    highest = 0
    first_failed: int | None = None
    deadline: float | None = None
    running = dict(enumerate(ranks))
    while running:
        for rank in _ended_ranks(running):
            code = running.pop(rank).returncode
            if deadline is None:
                deadline = time.monotonic() + grace_s
            if code < 0:
                _logger.error("rank %d was killed by signal %d", rank, -code)
            if first_failed is not None and code == -signal.SIGABRT:
                _logger.error(
                    "rank %d aborted because rank %d had failed before", rank, first_failed
                )
                continue
            if code != 0 and first_failed is None:
                first_failed = rank
            if code < 0:
                # The shell's convention, on which slurm/common.sh acts.
                code = 128 - code
            highest = max(highest, code)
        if deadline is not None and time.monotonic() > deadline:
            for rank in running:
                _logger.error("rank %d did not end within %g s of the first", rank, grace_s)
            _kill(list(running.values()))
        time.sleep(_POLL_EVERY_S)
    return highest


def _ended_ranks(running: dict[int, subprocess.Popen[bytes]]) -> list[int]:
    """The ranks that have ended, with those that aborted at the end of the list.

    NCCL aborts a rank whose peer has failed. Where both have ended since the last poll, the peer
    must come first, so that its exit code counts and the abort does not.
    """
    ended = []
    aborted = []
    for rank, process in running.items():
        code = process.poll()
        if code == -signal.SIGABRT:
            aborted.append(rank)
        elif code is not None:
            ended.append(rank)
    return ended + aborted


@contextlib.contextmanager
def _forwarded_signals(ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait()


if __name__ == "__main__":
    log.configure()
    if "STAGE" in os.environ:
        # A stage of slurm/cpt_korean.sh: it stops with the script.
        stop_with_parent(os.getppid())
    sys.exit(run_ranks(sys.argv[2:], int(sys.argv[1])))
