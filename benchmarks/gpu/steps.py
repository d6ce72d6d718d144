"""The benchmark of training steps, one shape a part."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.runs import run
from benchmarks.gpu.setting import Row, Setting
from benchmarks.gpu_step import ON_A_GPU

_LAST_TURN_S, _TO_REPORT_S = 40.0, 5.0


def check_steps(setting: Setting, shape: str) -> Iterator[Row]:
    """The speed and memory of every variant."""
    output = setting.folder / f"gpu_step-{shape}.json"
    options = ["--shape", shape, "--seconds", str(max(1.0, setting.seconds - _LAST_TURN_S)), "--json", str(output)]
    if not setting.on_gpu:
        options += ["--cpu", "--tiny", "--rounds", "1", "--steps", "1", "--threads", "1"]
        if shape != ON_A_GPU[0]:  # every variant is tried once
            options += ["--variant", "fft", "preserve"]
    output.unlink(missing_ok=True)
    try:
        run([sys.executable, "benchmarks/gpu_step.py", *options], setting, timeout=setting.seconds - _TO_REPORT_S)
    except subprocess.TimeoutExpired:
        yield Row(f"{shape}: the last turn ends in time", False, "ended; the rows below are what it had found")
        if not output.exists():
            return
    written = json.loads(output.read_text(encoding="utf-8"))
    for row in written["rows"]:
        found = row["outcome"]
        if found == "measured":
            found = f"{row['tokens_per_second']:,.0f} tokens/s, {row['tflops']:.1f} TFLOP/s, "
            found += f"{row['seconds_per_step']:.4f} s a step"
            found += f", {row['peak_memory_gib']:.1f} GiB" if "peak_memory_gib" in row else ""
        yield Row(f"{shape}, {row['variant']}", None, found)
