"""Runs one part, and prints each row as a line of JSON: for `tools/gpu_check.py`, in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.exactness import check_attention, check_parity
from benchmarks.gpu.memory import check_memory
from benchmarks.gpu.runs import check_deepspeed, check_demo, check_run
from benchmarks.gpu.setting import Row, Setting
from benchmarks.gpu.steps import check_steps
from pipeline import command_line

PARTS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "parity": check_parity,
    "attention": check_attention,
    "deepspeed": check_deepspeed,
    "memory": check_memory,
    **{f"step-{shape}": partial(check_steps, shape=shape) for shape in ("1b-8192", "1b-4096", "8b-4096")},
    "run": check_run,
    "demo": check_demo,
}


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
    if arguments.device == "cpu":
        torch.set_num_threads(min(2, torch.get_num_threads()))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(arguments.device, arguments.folder.resolve(), arguments.seconds)
    for row in PARTS[arguments.part](setting):
        print(json.dumps(row._asdict()), file=rows, flush=True)


if __name__ == "__main__":
    command_line.run(main)
