"""Runs one part, and prints each row as a line of JSON: for `tools/gpu_check.py`, in a process of its own."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.setting import Row, Setting
from pipeline import command_line

PARTS: dict[str, tuple[str, ...]] = {
    "parity": ("exactness", "check_parity"),
    "attention": ("exactness", "check_attention"),
    "kernels": ("kernels", "check_kernels"),
    "exports": ("exports", "check_exports"),
    "deepspeed": ("runs", "check_deepspeed"),
    "memory": ("memory", "check_memory"),
    **{f"step-{shape}": ("steps", "check_steps", shape) for shape in ("1b-8192", "1b-4096", "8b-4096")},
    "run": ("runs", "check_run"),
    "watchdog": ("ranks", "check_watchdog"),
    "demo": ("runs", "check_demo"),
}
"""The module and function of each part, and what the function gets beside the setting."""


def rows_of(part: str, setting: Setting) -> Iterator[Row]:
    """Runs a part; what the others need is not imported."""
    module, function, *arguments = PARTS[part]
    rows: Iterator[Row] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(setting, *arguments)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the part writes")
    parser.add_argument("--seconds", type=float, required=True, help="when it has to end")
    arguments = parser.parse_args()
    # Libraries print to standard output, too: the rows get it for themselves.
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(arguments.device, arguments.folder.resolve(), arguments.seconds)
    for row in rows_of(arguments.part, setting):
        print(json.dumps(row._asdict()), file=rows, flush=True)


if __name__ == "__main__":
    command_line.run(main)
