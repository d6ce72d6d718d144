"""The watchdog: what rank 0 spends on the heartbeats of all ranks, and how soon it names one that
is gone.

Rank 0 is the real one. The others are connections of one process, which send the heartbeats of real
ranks.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.results import Row
from benchmarks.scale.growth import measured, report
from pipeline.config.health import WatchdogSettings as Limits
from pipeline.health import channel, watchdog
from pipeline.health.liveness import RankReport, Verdict
from pipeline.health.phases import Phases

GOALS: dict[str, float] = {
    "core_fraction": 0.02,
    "killed_named_s": 2,
    # After `dead_after_s`.
    "silent_named_s": 10,
}
_TOKEN = "benchmark"
_REPORT = RankReport(
    "node0001", 1234, "backward", 0.7, 98765, "backward (tensor.py:581)", waiting=True
)


def watch(ranks: int, seconds: float, limits: Limits, own: Any) -> None:
    """Rank 0. It sends its port, what it costs in `seconds` once all have connected, and that one
    is gone."""
    # A usual limit of open files, which the hub must raise: it has a connection to every rank.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    listener = channel.listen()
    row: Row = {}

    def named(verdict: Verdict) -> None:
        assert verdict.rank == ranks - 1, verdict.text
        own.send(verdict.text)

    # The other ranks find it by the port below, instead of by the store of a process group.
    channel.connect = lambda: channel.Channel(listener, 0, _TOKEN)
    hub = watchdog.RankWatchdog(limits, Phases(torch.device("cpu")), Path("/nonexistent"), named)
    with measured(row, "connecting_"):
        hub.__enter__()
        own.send(listener.getsockname()[1])
        while len(hub._channel.peers) < ranks - 1:
            time.sleep(0.1)
    with measured(row, "watching_"):
        time.sleep(seconds)
    own.send(row | {"core_fraction": round(row["watching_cpu_s"] / seconds, 4)})
    # It names the rank that is gone while this thread sleeps; the process ends with its parent.
    time.sleep(600)


async def watched(ranks: int, seconds: float, limits: Limits, *, killed: bool) -> tuple[Row, float]:
    """What rank 0 costs, and in how many seconds it names the last rank, which is killed, or only
    falls silent."""
    beat_s = watchdog.heartbeat_interval_s(limits, ranks)
    results, own = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.Process(target=watch, args=(ranks, seconds, limits, own), daemon=True).start()
    # Only the child may hold its end: then `recv` fails where the child ends without a result.
    own.close()
    port = results.recv()
    writers: dict[int, asyncio.StreamWriter] = {}

    async def rank(number: int) -> None:
        # Heartbeats of real ranks come at different times too.
        await asyncio.sleep(random.Random(number).random() * beat_s)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writers[number] = writer
        writer.write(channel.encode({"rank": number, "token": _TOKEN}))
        while True:
            writer.write(channel.encode({"report": asdict(_REPORT)}))
            await asyncio.sleep(beat_s)

    tasks = [asyncio.create_task(rank(number)) for number in range(1, ranks)]
    row = await asyncio.to_thread(results.recv)
    tasks[-1].cancel()
    if killed:
        # The system closes the connections of a process that ends.
        writers[ranks - 1].close()
    began = time.monotonic()
    await asyncio.to_thread(results.recv)
    return row, round(time.monotonic() - began, 2)


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of ranks."""
    counts = (1024, 4096)
    seconds = 30
    limits = Limits()
    if smallest:
        counts = (4, 8)
        seconds = 1
        limits = Limits(beat_every_s=0.5, dead_after_s=5)

    def row(ranks: int) -> Row:
        # What rank 0 costs needs to be watched for long in one of the two cases only.
        costs, killed = asyncio.run(watched(ranks, seconds, limits, killed=True))
        _, silent = asyncio.run(watched(ranks, 1, limits, killed=False))
        return {
            **costs,
            "killed_named_s": killed,
            "silent_named_s": round(silent - limits.dead_after_s, 2),
        }

    yield report(
        "Watchdog: rank 0 of so many ranks, 100 heartbeats a second or more",
        "ranks",
        counts,
        row,
        GOALS,
    )
