"""What a trace of torch.profiler says about a run: how long the device idles, and which optimizer runs."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Row, Setting

_ON_A_GPU, _ON_A_CPU = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)
_MOST_IDLE = 0.05

Interval = tuple[float, float]
"""Where something begins and ends, in microseconds."""


def check_trace(run_folder: Path, setting: Setting) -> Iterable[Row]:
    """The device's idle share over the traced steps of a run, and its optimizer."""
    from pipeline.observers.performance import PROFILE  # it needs deepspeed, as the run did

    (path,) = (run_folder / PROFILE).iterdir()
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]
    steps = _intervals(event for event in events if re.fullmatch(r"ProfilerStep#\d+", event["name"]))
    window = min(begin for begin, _ in steps), max(end for _, end in steps)
    kinds = _ON_A_GPU if setting.on_gpu else _ON_A_CPU
    idle = idle_share(_intervals(event for event in events if event.get("cat") in kinds), window)
    passed = idle < _MOST_IDLE if setting.judges_speed else None
    found = f"{idle:.1%} of {(window[1] - window[0]) / 1e3:,.1f} ms"
    if not setting.on_gpu:
        found += ", between operators of the CPU: says nothing about a GPU"
    yield Row(f"time between kernels in {len(steps)} step(s) of the run (goal: below 5 %)", passed, found)
    fused = sum(event["name"] == "aten::_fused_adamw_" for event in events)
    yield Row("the optimizer of the run is torch's fused AdamW", fused > 0, f"{fused} calls in {len(steps)} step(s)")


def idle_share(busy: Iterable[Interval], window: Interval) -> float:
    """The share of `window` that no interval of `busy` covers; they may overlap, and reach beyond it."""
    covered, reached = 0.0, window[0]
    for begin, end in sorted(busy):
        end = min(end, window[1])
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - covered / (window[1] - window[0])


def _intervals(events: Iterable[dict[str, Any]]) -> list[Interval]:
    # On a GPU a span of the program appears a second time, as what the device did in it.
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") != "gpu_user_annotation"]
