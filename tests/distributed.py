"""Runs a test's function on several real ranks, connected by gloo. No rank outlives the call."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.parallel.topology import Layout, ProcessGroups, TensorParallel
from tests.waiting import PATIENCE_S

# Ranks are forked from a server that has imported the slow packages: 0.1 s each instead of 8.
processes = get_context("forkserver")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported
# DeepSpeed decorates two functions with torch.compile, which no test calls. It would import
# TorchInductor: 1.3 s a process, including those that tests start.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
processes.set_forkserver_preload(["tests.preloaded"])

GRACE_S = 10.0
"""How long to wait for the other ranks after the first failure, which may only be a consequence of
theirs."""


class RankError(AssertionError):
    """A rank raised, died, or did not end in time; the message carries its traceback."""


def all_ranks(sequence_parallel: bool = False) -> TensorParallel:
    """This rank's place among all of them as one tensor-parallel group."""
    layout = Layout(dist.get_world_size(), dist.get_world_size())
    return ProcessGroups(layout, sequence_parallel=sequence_parallel).tensor_parallel


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = PATIENCE_S
) -> list[Any]:
    """Calls `function(*arguments)` on `world_size` ranks and returns their results in rank order.

    `function` must be importable, its arguments and results picklable. The default process group is
    initialised, and RANK, LOCAL_RANK and WORLD_SIZE are set.

    Raises:
        RankError: a rank raised, died, or did not end within `timeout_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        ranks = []
        for rank in range(world_size):
            rank_arguments = (folder, rank, world_size, function, arguments)
            ranks.append(processes.Process(target=_rank, args=rank_arguments, daemon=True))
        for process in ranks:
            process.start()
        late = []
        results = []
        failures = []
        try:
            _await_all(ranks, time.monotonic() + timeout_s)
            for rank, process in enumerate(ranks):
                if process.exitcode is None:
                    late.append(rank)
                    continue
                moment, succeeded, result = _answer(folder / str(rank))
                if succeeded:
                    results.append(result)
                else:
                    failures.append((moment, result))
        finally:
            for process in ranks:
                process.kill()
                process.join()
    if failures:
        # The earliest failure comes first: it is the cause of others.
        raise RankError("\n".join(failure for _, failure in sorted(failures)))
    if late:
        raise RankError(f"ranks {late} did not end in time")
    return results


def _await_all(ranks: list[Any], deadline: float) -> None:
    """Waits for the ranks' end, and for at most GRACE_S after one failed."""
    running = {process.sentinel: process for process in ranks}
    while running:
        ended = connection.wait(running, timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _answer(file: Path) -> tuple[float, bool, Any]:
    """When a rank ended, whether it succeeded, and its result or fault."""
    if not file.exists():
        return time.monotonic(), False, f"rank {file.name} died without a result"
    answer: tuple[float, bool, Any] = pickle.loads(file.read_bytes())
    return answer


def _rank(
    folder: Path,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), DS_ACCELERATOR="cpu"
    )
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=PATIENCE_S)}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", **options)
    dist.barrier()  # a rank that ends at once would close connections that others still make
    exit_code = 0
    try:
        # A result that cannot be pickled is a fault of the test, and reported as one.
        answer = pickle.dumps((time.monotonic(), True, function(*arguments)))
    except BaseException:  # noqa: BLE001  the test must see every error
        fault = f"rank {rank} raised:\n{traceback.format_exc()}"
        answer = pickle.dumps((time.monotonic(), False, fault))
        exit_code = 1
    (folder / str(rank)).write_bytes(answer)
    dist.destroy_process_group()
    sys.exit(exit_code)
