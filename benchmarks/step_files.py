"""Which files of the package a plain training step passes through, from its tokens to the optimizer.

    python -m benchmarks.step_files

Trains the demo's base widened by Adapt, without anything optional, and records the third step: every
file of pipeline/ in which a function was called, and its lines. A reader who follows a step reads
these files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pipeline
from benchmarks.results import DATA, STORIES, Row, make_parser, print_rows, write_rows
from pipeline.commands import build_parser

PACKAGE = Path(pipeline.__file__).parent
_RECORDED_STEP = 3
"""A step after the first: what happens once is over."""
# A step of one rank: its dry run on a machine without GPUs, which assumes two, needs NPROC=1.
CONFIG = f"""
name: plain
folder: {{folder}}
base: {STORIES}
method:
  name: scale
  variant: adapt
  expansion: {{{{hidden_size: 16, intermediate_size: 24, num_attention_heads: 2}}}}
  l_fp: 2
data:
  folder: {{folder}}/tokens
  sequence_length: 64
  replay_fraction: 0.0
  corpora:
    korean:
      input: [{DATA}/ko/reviews.heldout.jsonl.zst]
      heldout_input: [{DATA}/ko/reviews.heldout.jsonl.zst]
schedule: {{{{steps: 3, global_batch_size: 2, micro_batch_size: 2, learning_rate: 1.0e-3}}}}
validation: {{{{max_sequences: 2}}}}
deepspeed: ds_configs/zero1_fp32.json
"""


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "plain.yaml"
        config.write_text(CONFIG.format(folder=folder), encoding="utf-8")
        for command in ("tokenize", "upscale"):
            _run(command, config)
        found = Path(folder) / "found.json"
        # In a process of its own: training ends the process that it runs in.
        training = get_context("spawn").Process(target=_record_step, args=(config, found))
        training.start()
        training.join()
        called: dict[str, list[str]] = json.loads(found.read_bytes())
    rows: list[Row] = []
    for name, functions in sorted(called.items()):
        lines = len((PACKAGE / name).read_text(encoding="utf-8").splitlines())
        rows.append({"file": name, "lines": lines, "functions": len(functions)})
    print_rows(rows)
    print(f"{len(rows)} files, {sum(row['lines'] for row in rows):,} lines")
    write_rows(arguments, rows)


def _run(command: str, config: Path) -> None:
    arguments = build_parser([command]).parse_args([command, str(config)])
    arguments.main(arguments)


def _record_step(config: Path, found: Path) -> None:
    """Trains, and writes to `found` the functions that one step calls in the main thread, by file."""
    # Here, because training loads torch and DeepSpeed.
    from pipeline.training.trainer import Trainer

    called: dict[str, set[str]] = defaultdict(set)

    def record(frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            called[str(file.relative_to(PACKAGE))].add(frame.f_code.co_name)

    take_step: Callable[..., Any] = Trainer.take_step

    def recorded(trainer: Trainer, signals: Any) -> Any:
        if trainer.position.step + 1 != _RECORDED_STEP:
            return take_step(trainer, signals)
        sys.setprofile(record)
        try:
            return take_step(trainer, signals)
        finally:
            sys.setprofile(None)
            functions = {file: sorted(names) for file, names in called.items()}
            found.write_text(json.dumps(functions), encoding="utf-8")

    with mock.patch.object(Trainer, "take_step", recorded):
        _run("train", config)


if __name__ == "__main__":
    main()
