"""What a trace of torch's profiler says of a run: the device's idle time, and its optimizer."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.gpu.setting import CheckRow, Setting

Interval = tuple[float, float]
"""The begin and the end of an event, in microseconds."""
_MOST_IDLE = 0.05


def check_trace(run_folder: Path, setting: Setting) -> Iterator[CheckRow]:
    """The device's idle share over the traced steps of a run, and its optimizer."""
    from pipeline.observers.performance import PROFILE  # it needs deepspeed, as the run did

    (path,) = (run_folder / PROFILE).iterdir()
    events = []
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        # "X": an event with a duration. On a GPU a span of the program appears a second time, as
        # what the device did in it (gpu_user_annotation).
        if event["ph"] == "X" and event.get("cat") != "gpu_user_annotation":
            events.append(event)

    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if setting.on_gpu else ("cpu_op",)
    steps: list[Interval] = []
    busy: list[Interval] = []
    fused = 0
    for event in events:
        interval = (event["ts"], event["ts"] + event["dur"])
        if re.fullmatch(r"ProfilerStep#\d+", event["name"]):
            steps.append(interval)
        if event.get("cat") in kinds:
            busy.append(interval)
        if event["name"] == "aten::_fused_adamw_":
            fused += 1

    window = (min(begin for begin, _ in steps), max(end for _, end in steps))
    idle = idle_share(busy, window)
    found = f"{idle:.1%} of {(window[1] - window[0]) / 1e3:,.1f} ms"
    if not setting.on_gpu:
        found += ", between operators of the CPU: says nothing about a GPU"
    passed = idle < _MOST_IDLE if setting.judges_speed else None
    yield CheckRow(
        f"time between kernels in {len(steps)} step(s) of the run (goal: below 5 %)", passed, found
    )
    yield CheckRow(
        "the optimizer of the run is torch's fused AdamW",
        fused > 0,
        f"{fused} calls in {len(steps)} step(s)",
    )


def idle_share(busy: Iterable[Interval], window: Interval) -> float:
    """The share of `window` that no interval of `busy` covers.

    Intervals may overlap, as those of several streams do, and reach beyond the window.
    """
    first, last = window
    covered = 0.0
    # Up to here the window is accounted for: what an interval covers before it was counted already.
    reached = first
    for begin, end in sorted(busy):
        end = min(end, last)
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - covered / (last - first)
