"""Runs a test's function on several real ranks, connected by gloo. No rank outlives the call."""

from __future__ import annotations

import os
import pickle
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
# DeepSpeed decorates two functions with torch.compile, which no test calls. It would import TorchInductor: 1.3 s a
# process, including those that tests start.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
processes.set_forkserver_preload(["tests.preloaded"])

GRACE_S = 10.0
"""How long to wait for the other ranks after the first failure, which may only be a consequence of theirs."""


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

    `function` must be importable, its arguments and results picklable. The default process group is initialised, and
    RANK, LOCAL_RANK and WORLD_SIZE are set.

    Raises:
        RankError: a rank raised, died, or did not end within `timeout_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes, ranks = [], []
        for rank in range(world_size):
            receiver, sender = processes.Pipe(duplex=False)
            store = Path(folder) / "rendezvous"
            process = processes.Process(
                target=_rank, args=(sender, store, rank, world_size, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            ranks.append(process)
        try:
            results = _results(pipes, time.monotonic() + timeout_s)
            for process in ranks:
                process.join(timeout=PATIENCE_S)
            return results
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _results(pipes: list[connection.Connection], deadline: float) -> list[Any]:
    """The result of each pipe. A failure shortens the wait to GRACE_S, since the other ranks may wait for that one."""
    results: dict[int, Any] = {}
    failures: list[tuple[float, str]] = []
    while waiting := [pipe for pipe in pipes if not pipe.closed]:
        ready = connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = pipes.index(pipe)
            try:
                moment, succeeded, result = pickle.loads(pipe.recv_bytes())
            except EOFError:
                moment, succeeded, result = time.monotonic(), False, "died without a result"
            pipe.close()
            if succeeded:
                results[rank] = result
            else:
                failures.append((moment, f"rank {rank} {result}"))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        # The earliest failure is the cause. Its consequences on other ranks may have arrived before it.
        raise RankError("\n".join(failure for _, failure in sorted(failures)))
    if waiting:
        raise RankError(f"ranks {[pipes.index(pipe) for pipe in waiting]} did not end in time")
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    sender: connection.Connection,
    store: Path,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), DS_ACCELERATOR="cpu")
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=PATIENCE_S)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **options)
    try:
        # Pickled here: the pipe would send tensors through shared memory, which ends with this rank.
        answer = pickle.dumps((time.monotonic(), True, function(*arguments)))
    except BaseException:  # noqa: BLE001  the test must see every error
        answer = pickle.dumps((time.monotonic(), False, f"raised:\n{traceback.format_exc()}"))
    finally:
        dist.destroy_process_group()
    sender.send_bytes(answer)
    sender.close()
