"""Starts one process per rank on this machine, forwards signals to them, and ends all of them.

    python -m pipeline.local_ranks 2 -m pipeline train configs/demo.yaml

torchrun exits with 1 whatever its ranks' codes are, waits half a minute for a stopped rank, and starts each rank in a
session of its own, where it survives when torchrun is killed.
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
from types import FrameType

from pipeline import log

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_POLL_EVERY_S = 0.1
_logger = log.get_logger(__name__)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the system assigns to no other program during the block.

    It is bound without listening: a program that listens with SO_REUSEADDR, as torch's store does, can still use it.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as held:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def run_ranks(command: Sequence[str], count: int) -> int:
    """Runs `command`, Python's arguments, as `count` ranks and returns their highest exit code, as srun does.

    After the first rank has ended, the others have EXIT_GRACE_S seconds of the environment, or 15, before they are
    killed, stopped ones included.
    Signals to this process are forwarded to all ranks. A rank that a signal ended counts as 128 + the signal's number,
    but not one that aborts after another has failed: NCCL aborts where a peer is gone.
    """
    with ExitStack() as started:
        port = started.enter_context(reserved_port())
        place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks: list[subprocess.Popen[bytes]] = []
        started.callback(_kill, ranks)
        started.enter_context(_forwarded_signals(ranks))
        for rank in range(count):
            environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, *command], env=environment))
        return _highest_exit_code(ranks, float(os.environ.get("EXIT_GRACE_S", "15")))


def _highest_exit_code(ranks: list[subprocess.Popen[bytes]], grace_s: float) -> int:
    highest, first_failed = 0, None
    deadline: float | None = None
    running = dict(enumerate(ranks))
    while running:
        ended = {rank: process for rank, process in running.items() if process.poll() is not None}
        # An abort may be only the consequence of what another rank met in the same moment.
        for rank, process in sorted(
            ended.items(), key=lambda item: item[1].returncode == -signal.SIGABRT
        ):
            del running[rank]
            deadline = deadline or time.monotonic() + grace_s
            if process.returncode < 0:
                _logger.error("rank %d was killed by signal %d", rank, -process.returncode)
            if first_failed is not None and process.returncode == -signal.SIGABRT:
                _logger.error(
                    "rank %d aborted because rank %d had failed before", rank, first_failed
                )
                continue
            if process.returncode != 0 and first_failed is None:
                first_failed = rank
            highest = max(
                highest,
                process.returncode,
                128 - process.returncode if process.returncode < 0 else 0,
            )
        if deadline is not None and time.monotonic() > deadline:
            for rank in running:
                _logger.error("rank %d did not end within %g s of the first", rank, grace_s)
            _kill(list(running.values()))
        time.sleep(_POLL_EVERY_S)
    return highest


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
    sys.exit(run_ranks(sys.argv[2:], int(sys.argv[1])))
