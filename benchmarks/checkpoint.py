"""The size of a checkpoint and the time to save it: this project's and DeepSpeed's default.

    python -m benchmarks.checkpoint --json benchmarks/out/checkpoint.json

Both save the same engine in the same run. Two data-parallel ranks train one step in bf16 on a base
in the proportions of a published Llama, every width divided by the same number, and widened by the
share that 256 channels have of the original. Then they save in turns: DeepSpeed's `save_checkpoint`
with its defaults, ours, and ours asynchronously. Ours syncs to disk and hashes every file; the
other does neither, so the time until its files are on disk is measured too.

A checkpoint that resumes exactly holds 12 bytes a trained parameter, whoever writes it. The default
adds 2 bytes for every parameter: it is 4 times as large only if less than 6 % are trained, as with
a large base.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.results import BASES, Row, adapt_run, make_parser, print_rows, write_rows
from pipeline.checkpoint.manifest import Position, describe_layout, describe_run
from pipeline.config.checkpoints import CheckpointSettings as Settings
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.files.json_files import write_json
from pipeline.files.publishing import sync
from pipeline.local_ranks import run_ranks
from pipeline.model.attention import Documents
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import read_spec
from pipeline.parallel.sharding import held_values
from pipeline.parallel.topology import Layout, ProcessGroups
from pipeline.training import launch
from pipeline.training.batches import MicroBatch

if TYPE_CHECKING:  # DeepSpeed chooses its accelerator when it is imported: on the ranks
    from pipeline.training.engine import Engine

RANKS = 2
SEQUENCE = 32
ROWS = "rows.json"
DEFAULT = "DeepSpeed's default"
OURS = "ours"
ASYNCHRONOUS = "ours, asynchronous"
WAYS = (DEFAULT, OURS, ASYNCHRONOUS)
NEEDED_BYTES = 12
"""Bytes of a trained parameter's fp32 weight and two moments."""
COPY_BYTES = 2
"""Bytes of the 16-bit copy of every parameter that the default saves."""
DIVISORS = {"llama-3.2-1b": 4, "llama-3.1-70b": 16}
ADDED_CHANNELS = 256


def narrow_base(name: str, divisor: int) -> dict[str, Any]:
    """The config.json of a base with the layers, the heads and all proportions of the named one."""
    described = json.loads((BASES / f"{name}.json").read_text(encoding="utf-8"))
    for width in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"):
        described[width] //= divisor
    return dict(described)


def run_on(folder: Path, divisor: int, zero_stage: int) -> RunConfig:
    """A run of one sequence a rank, whose data are never read, on the narrow base in `folder`.

    Adapt, as in the paper: 256 channels, one key/value head with its query heads, and the same
    share of the FFN as of the channels; W12 in the attention above the lowest fifth of the layers.
    """
    spec = read_spec(folder)
    channels = ADDED_CHANNELS // divisor
    expansion = {
        "hidden_size": channels,
        "intermediate_size": channels * spec.widths.intermediate_size // spec.widths.hidden_size,
        "num_attention_heads": spec.widths.num_attention_heads // spec.widths.num_key_value_heads,
    }
    return adapt_run(
        folder, folder, zero_stage, RANKS, expansion=expansion, l_fp=spec.num_layers // 5
    )


def measure(divisor: int, zero_stage: int, rounds: int, folder: Path) -> None:
    """One rank; rank 0 writes a row for each way of saving."""
    torch.set_num_threads(1)
    launch.initialise(launch.read_launch(os.environ))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    config = run_on(folder, divisor, zero_stage)
    engine = trained_engine(config)
    saver = Saver(config, engine, zero_stage)
    seconds: dict[str, list[Seconds]] = {way: [] for way in WAYS}
    size: dict[str, int] = {}
    for step in range(1, rounds + 2):
        for way in WAYS:
            taken, saved = saver.save(way, step)
            size[way] = sum(file.stat().st_size for file in saved.iterdir())
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / way)
            if step > 1:  # the first is a warm-up
                seconds[way].append(taken)
    trained = engine.trainable_parameters
    rows: list[Row] = []
    for way in WAYS:
        blocked = [taken.blocked for taken in seconds[way]]
        rows.append(
            {
                "base_parameters": engine.total_parameters - trained,
                "trainable_parameters": trained,
                "zero_stage": zero_stage,
                "way": way,
                "bytes": size[way],
                "size_to_needed": size[way] / (NEEDED_BYTES * trained),
                "default_to_size": size[DEFAULT] / size[way],
                "blocked_s": statistics.median(blocked),
                "blocked_s_min": min(blocked),
                "on_disk_s": statistics.median(taken.on_disk for taken in seconds[way]),
            }
        )
    if dist.get_rank() == 0:
        write_json(folder / ROWS, rows)
    dist.destroy_process_group()


class Seconds(NamedTuple):
    """The time of one save until training continues, and until everything is on disk."""

    blocked: float
    on_disk: float


class Saver:
    """Saves `engine` in each of the ways."""

    def __init__(self, config: RunConfig, engine: Engine, zero_stage: int) -> None:
        from pipeline.training.checkpointing import CheckpointManager

        base = BaseFolder(config.base, read_spec(config.base))
        base.set_known_hashes({})
        run = describe_run(config, base, engine.model, "none")
        layout = describe_layout(Layout(RANKS), zero_stage, torch.bfloat16)
        self.folder = config.folder
        self.engine = engine
        self.checkpoints: dict[str, CheckpointManager] = {}
        for way in (OURS, ASYNCHRONOUS):
            settings = Settings(keep_last=1, asynchronous=way == ASYNCHRONOUS)
            self.checkpoints[way] = CheckpointManager(self.folder / way, run, layout, settings)

    def save(self, way: str, step: int) -> tuple[Seconds, Path]:
        """The time of the slowest rank, and the checkpoint's folder."""
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        dist.barrier()
        started = time.perf_counter()
        if way == DEFAULT:
            deepspeed_engine = self.engine._engine
            deepspeed_engine.checkpoint_engine = TorchCheckpointEngine()
            deepspeed_engine.save_checkpoint(str(self.folder / way), tag=f"step_{step}")
            saved = self.folder / way / f"step_{step}"
        else:
            saved = self.checkpoints[way].save(
                self.engine, Position(step=step, tokens_seen=0, seconds=0.0)
            )
        dist.barrier()
        blocked = time.perf_counter() - started
        if way == DEFAULT:
            for file in sorted(saved.iterdir())[dist.get_rank() :: RANKS]:
                sync(file)
        else:
            self.checkpoints[way].finish()
        dist.barrier()
        return Seconds(blocked, time.perf_counter() - started), saved


def trained_engine(config: RunConfig) -> Engine:
    """An engine with random weights after one step, so that the optimizer has its state."""
    from pipeline.training.engine import Engine, build_model

    spec = read_spec(config.base)
    layout = Layout(RANKS)
    settings = load_deepspeed_config(config.deepspeed, layout)
    groups = ProcessGroups(layout)
    torch.manual_seed(0)
    model = build_model(config, BaseFolder(config.base, spec), settings, groups)
    for parameter in model.parameters():
        held_values(parameter).detach().normal_(std=0.02)
    engine = Engine(model, config, settings, groups)
    tokens = torch.randint(spec.vocab_size, (1, SEQUENCE))
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    documents = Documents.of(torch.zeros_like(tokens))
    engine.backward(engine.loss(MicroBatch(tokens, tokens, positions, documents))[0])
    engine.step(1e-3)
    return engine


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--bases", nargs="+", choices=list(DIVISORS), default=list(DIVISORS))
    parser.add_argument("--divisor", type=int, help=f"of every width; default {DIVISORS}")
    parser.add_argument("--zero-stages", nargs="+", type=int, choices=[1, 2, 3], default=[1, 3])
    parser.add_argument("--rounds", type=int, default=5, help="timed saves a way, after a warm-up")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="on the disk to be measured"
    )
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # on a rank
    options = parser.parse_args()
    if options.measure:
        divisor, stage, rounds, place = options.measure
        measure(int(divisor), int(stage), int(rounds), Path(place))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for base, stage in product(options.bases, options.zero_stages):
        divisor = options.divisor or DIVISORS[base]
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoints-") as folder:
            write_json(Path(folder, "config.json"), narrow_base(base, divisor))
            arguments = (divisor, stage, options.rounds, Path(folder).resolve())
            if run_ranks(["-m", "benchmarks.checkpoint", "--measure", *map(str, arguments)], RANKS):
                raise SystemExit(
                    f"error: {base}, ZeRO-{stage}: a rank failed; its traceback is above"
                )
            for row in json.loads(Path(folder, ROWS).read_text(encoding="utf-8")):
                rows.append({"base": base, **row})
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    main()
