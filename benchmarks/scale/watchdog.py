"""The watchdog: what rank 0 spends on the heartbeats of all ranks, and how soon it names one that is gone.

Rank 0 is the real one. The others are connections of one process, which send the heartbeats of real ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from benchmarks.scale.growth import Row, measured, report
from pipeline.config.run import Watchdog as Limits
from pipeline.health import watchdog
from pipeline.health.liveness import Phases, RankReport, Verdict

GOALS = {"core_fraction": 0.02, "killed_named_s": 2, "silent_named_s": 10}  # after `dead_after_s`
_TOKEN = "benchmark"
_REPORT = RankReport("node0001", 1234, "backward", 0.7, 98765, "backward (tensor.py:581)", waiting=True)


def watch(ranks: int, seconds: float, limits: Limits, gone: Any, own: Any) -> None:  # noqa: ANN401
    """Rank 0, for `seconds`. Then `gone` tells the others, one of which vanishes; the verdict ends the process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))  # a usual limit
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    listener, row, began = watchdog._listener(), Row(), [0.0]

    def named(verdict: Verdict) -> None:
        assert verdict.rank == ranks - 1, verdict.text
        own.send(row | {"named_s": round(time.monotonic() - began[0], 2)})

    watchdog.connect = lambda: watchdog.Channel(listener, 0, _TOKEN)
    hub = watchdog.Watchdog(limits, Phases(torch.device("cpu")), Path("/nonexistent"), named)
    with measured(row):
        hub.__enter__()
        own.send(listener.getsockname()[1])
        while len(hub._channel.peers) < ranks - 1:
            time.sleep(0.1)
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(seconds)
    row["core_fraction"] = round((time.process_time() - cpu) / (time.monotonic() - wall), 4)
    began[0] = time.monotonic()
    gone.set()
    time.sleep(600)


def others(ranks: int, beat_s: float, killed: bool, port: int, gone: Any) -> None:  # noqa: ANN401
    """All other ranks. When `gone` is set, the last one is killed, or only falls silent."""

    async def rank(own: int, over: asyncio.Event) -> None:
        await asyncio.sleep(random.Random(own).random() * beat_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(watchdog._line({"rank": own, "token": _TOKEN}))
        listening = asyncio.create_task(reader.read(-1))
        while not over.is_set():
            writer.write(watchdog._line({"report": asdict(_REPORT)}))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(over.wait(), beat_s)
        if killed:
            writer.close()
        await listening

    async def all_ranks() -> None:
        ends = [asyncio.Event() for _ in range(ranks)]
        tasks = [asyncio.create_task(rank(own, ends[own])) for own in range(1, ranks)]
        while not gone.is_set():
            await asyncio.sleep(0.05)
        ends[-1].set()
        await asyncio.gather(*tasks)

    asyncio.run(all_ranks())


def watched(ranks: int, seconds: float, limits: Limits, *, killed: bool) -> Row:
    """What the watchdog costs, and how long it takes to name a rank that is gone."""
    beat_s = limits.beat_every_s * watchdog.pauses_between_heartbeats(limits, ranks)
    context = multiprocessing.get_context("forkserver")
    gone, (results, own) = context.Event(), context.Pipe()
    hub = context.Process(target=watch, args=(ranks, seconds, limits, gone, own), daemon=True)
    hub.start()
    own.close()  # so that its end is noticed here
    rest = context.Process(target=others, args=(ranks, beat_s, killed, results.recv(), gone), daemon=True)
    rest.start()
    found: Row = results.recv()
    rest.terminate()
    return found


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of ranks."""
    rows: list[Row] = []
    seconds, limits = (1, Limits(beat_every_s=0.5, dead_after_s=5)) if smallest else (30, Limits())
    for ranks in (4, 8) if smallest else (1024, 4096):
        row, silent = (watched(ranks, seconds, limits, killed=killed) for killed in (True, False))
        named = {"killed_named_s": row.pop("named_s"), "silent_named_s": silent["named_s"] - limits.dead_after_s}
        rows.append({"ranks": ranks, **row, **named})
    yield report("Watchdog: rank 0 of so many ranks, 100 heartbeats a second or more", rows, GOALS)
