"""The benchmark of steps, benchmarks/gpu_step, as a part of the proof."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.commands import run_command
from benchmarks.gpu.setting import CheckRow, Setting
from benchmarks.gpu_step.shapes import ON_A_GPU
from benchmarks.results import Row

# The benchmark begins no turn in so many last seconds of the part's time: a turn may compile a
# model first. One that takes longer still is ended in time to report what was found before.
_LAST_TURN_S = 40.0
_TO_REPORT_S = 5.0


def steps_file(setting: Setting, shape: str) -> Path:
    """Where the benchmark writes the rows of a shape."""
    return setting.folder / f"gpu_step-{shape}.json"


def check_steps(setting: Setting, shape: str) -> Iterator[CheckRow]:
    """The speed and memory of every variant of the benchmark of training steps."""
    output = steps_file(setting, shape)
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_step", "--shape", shape]
    command += ["--seconds", str(max(1.0, setting.seconds - _LAST_TURN_S)), "--json", str(output)]
    if not setting.on_gpu:
        command += ["--cpu", "--tiny", "--rounds", "1", "--steps", "1", "--threads", "1"]
        if shape != ON_A_GPU[0]:
            # All shapes are as tiny: each variant is tried on the first.
            command += ["--variant", "fft", "preserve"]
    try:
        run_command(command, setting, timeout=setting.seconds - _TO_REPORT_S)
    except subprocess.TimeoutExpired:
        found = "ended; the rows below are what it had found"
        yield CheckRow(f"{shape}: the last turn ends in time", False, found)
    if not output.exists():
        return
    for row in json.loads(output.read_text(encoding="utf-8"))["rows"]:
        yield CheckRow(f"{shape}, {row['variant']}", None, _figures(row))


def _figures(row: Row) -> str:
    """The figures of a row of the benchmark in one line, or why there are none."""
    if row["outcome"] != "measured":
        return str(row["outcome"])
    figures = [
        f"{row['tokens_per_second']:,.0f} tokens/s",
        f"{row['tflops']:.1f} TFLOP/s",
        f"{row['seconds_per_step']:.4f} s a step",
    ]
    if "peak_memory_gib" in row:
        figures.append(f"{row['peak_memory_gib']:.1f} GiB")
    return ", ".join(figures)
