"""The ranks of a run as processes of this machine, forked from a server that has imported everything.

They run the same program as slurm/launch.sh, in the same environment. Training starts after a second.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from pipeline.local_ranks import reserved_port
from tests.distributed import processes


class LocalRanks:
    """One attempt of a run. Leaving the block kills the remaining ranks."""

    def __init__(self, config: Path, world_size: int, log: Path) -> None:
        self._port = ExitStack()
        port = self._port.enter_context(reserved_port())
        self._processes = [
            processes.Process(target=_train, args=(config, rank, world_size, port, log), daemon=True)
            for rank in range(world_size)
        ]
        for process in self._processes:
            process.start()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._port.close()

    @property
    def exit_codes(self) -> list[int | None]:
        """The exit code of each rank: negative if a signal ended it, None while it runs."""
        return [process.exitcode for process in self._processes]

    def kill(self, victims: Sequence[int]) -> bool:
        """Kills these ranks; returns False if all of them had already ended."""
        doomed = [self._processes[rank] for rank in victims]
        for process in doomed:
            process.kill()
        for process in doomed:
            process.join()
        return any(process.exitcode == -signal.SIGKILL for process in doomed)

    def wait(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` for all ranks; returns whether they ended."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return None not in self.exit_codes


def warm_up() -> None:
    """Lets the server finish its imports, so that no run waits for them."""
    first = processes.Process(target=int)
    first.start()
    first.join()


def _train(config: Path, rank: int, world_size: int, port: int, log: Path) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_PORT=str(port))
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = ["pipeline.train", str(config)]
    runpy.run_module("pipeline.train", run_name="__main__", alter_sys=True)
