"""The size of a checkpoint and the time to save it: this project's and DeepSpeed's default.

    python -m benchmarks.checkpoint --json benchmarks/out/checkpoint.json

Two data-parallel ranks train one step in bf16 on a base in the proportions of a published Llama,
every width divided by the same number, and widened by the share that 256 channels have of the
original. Then the same engine is saved in turns: by DeepSpeed's `save_checkpoint` with its
defaults, by ours, and by ours asynchronously.

`blocked_s` is how long training waits, and `on_disk_s` how long until the files are on disk, both
as the median of the rounds. Ours syncs to disk and hashes every file; the other does neither, so
its files are synced here. `size_to_needed` is the size over 12 bytes a trained parameter, which a
checkpoint that resumes exactly must hold, whoever writes it. The default adds 2 bytes for every
parameter: it is 4 times as large only if less than 6 % are trained, as with a large base.
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
from pipeline.checkpoint.manifest import describe_layout, describe_run
from pipeline.checkpoint.position import Position
from pipeline.config.checkpoints import CheckpointSettings as Settings
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.files.json_files import write_json
from pipeline.files.publishing import sync
from pipeline.local_ranks import run_ranks
from pipeline.model.attention import Documents
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import read_spec
from pipeline.parallel.parameters import held_values
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
"""By how much each base is narrowed, so that two ranks of it fit a machine without a GPU."""
ADDED_CHANNELS = 256
"""The paper's, for the original width."""


def narrow_base(name: str, divisor: int) -> dict[str, Any]:
    """The config.json of a base with the layers, the heads and all proportions of the named one."""
    config: dict[str, Any] = json.loads((BASES / f"{name}.json").read_text(encoding="utf-8"))
    # Layers and heads stay, so that there are as many tensors as in the original: each is an entry
    # of a checkpoint's files.
    for width in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"):
        config[width] //= divisor
    return config


def run_on(folder: Path, divisor: int, zero_stage: int) -> RunConfig:
    """A run of one sequence a rank, whose data are never read, on the narrow base in `folder`.

    Adapt, as in the paper: 256 channels, one key/value head with its query heads, and the same
    share of the FFN as of the channels; W12 in the attention above the lowest fifth of the layers.
    """
    spec = read_spec(folder)
    widths = spec.widths
    channels = ADDED_CHANNELS // divisor
    expansion = {
        "hidden_size": channels,
        "intermediate_size": channels * widths.intermediate_size // widths.hidden_size,
        "num_attention_heads": widths.num_attention_heads // widths.num_key_value_heads,
    }
    return adapt_run(
        folder, folder, zero_stage, RANKS, expansion=expansion, l_fp=spec.num_layers // 5
    )


def measure(divisor: int, zero_stage: int, rounds: int, folder: Path) -> None:
    """One rank; rank 0 writes a row for each way of saving."""
    # Two ranks share the machine, and saving computes nothing.
    torch.set_num_threads(1)
    launch.initialise(launch.read_launch(os.environ))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    config = run_on(folder, divisor, zero_stage)
    engine = trained_engine(config)
    saver = Saver(config, engine, zero_stage)
    saves: dict[str, list[Save]] = {way: [] for way in WAYS}
    for step in range(rounds + 1):
        for way in WAYS:
            save = saver.save(way, step + 1)
            # All ranks have counted the files before rank 0 removes them: disks stay as empty as
            # before, and no way has the files of another in the system's cache.
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / way)
            # The first round is a warm-up: it starts threads and makes buffers.
            if step > 0:
                saves[way].append(save)
    if dist.get_rank() == 0:
        write_json(folder / ROWS, rows_of(engine, zero_stage, saves))
    dist.destroy_process_group()


def rows_of(engine: Engine, zero_stage: int, saves: dict[str, list[Save]]) -> list[Row]:
    """The row of each way of saving."""
    trained = engine.trainable_parameters
    default_bytes = saves[DEFAULT][-1].bytes
    rows: list[Row] = []
    for way, done in saves.items():
        blocked = [save.blocked_s for save in done]
        size = done[-1].bytes
        row: Row = {"base_parameters": engine.total_parameters - trained}
        row["trainable_parameters"] = trained
        row["zero_stage"] = zero_stage
        row["way"] = way
        row["bytes"] = size
        row["size_to_needed"] = size / (NEEDED_BYTES * trained)
        row["default_to_size"] = default_bytes / size
        row["blocked_s"] = statistics.median(blocked)
        # What the disk takes when nothing else writes to it.
        row["blocked_s_min"] = min(blocked)
        row["on_disk_s"] = statistics.median(save.on_disk_s for save in done)
        rows.append(row)
    return rows


class Save(NamedTuple):
    """What one save took, of the slowest rank."""

    blocked_s: float
    """until training continues"""
    on_disk_s: float
    """until everything is on disk"""
    bytes: int


class Saver:
    """Saves `engine` in each of the ways."""

    def __init__(self, config: RunConfig, engine: Engine, zero_stage: int) -> None:
        from pipeline.training.checkpointing import CheckpointManager

        base = BaseFolder(config.base, read_spec(config.base))
        # The base has no weights, whose hashes a manifest would hold.
        base.set_known_hashes({})
        run = describe_run(config, base, engine.model, "none")
        layout = describe_layout(Layout(RANKS), zero_stage, torch.bfloat16)
        self.folder = config.folder
        self.engine = engine
        self.checkpoints: dict[str, CheckpointManager] = {}
        for way in (OURS, ASYNCHRONOUS):
            settings = Settings(keep_last=1, asynchronous=way == ASYNCHRONOUS)
            self.checkpoints[way] = CheckpointManager(self.folder / way, run, layout, settings)

    def save(self, way: str, step: int) -> Save:
        """Saves once. All ranks call it together, and each waits for the slowest."""
        dist.barrier()
        started = time.perf_counter()
        if way == DEFAULT:
            saved = self._save_by_default(step)
        else:
            position = Position(step=step, tokens_seen=0, seconds=0.0)
            saved = self.checkpoints[way].save(self.engine, position)
        dist.barrier()
        blocked = time.perf_counter() - started
        if way == DEFAULT:
            # What it wrote is in the system's memory still. Each rank syncs its part of the files.
            for file in sorted(saved.iterdir())[dist.get_rank() :: RANKS]:
                sync(file)
        else:
            self.checkpoints[way].finish()
        dist.barrier()
        on_disk = time.perf_counter() - started
        return Save(blocked, on_disk, sum(file.stat().st_size for file in saved.iterdir()))

    def _save_by_default(self, step: int) -> Path:
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        engine = self.engine._engine
        # The default of a DeepSpeed configuration without a section `checkpoint`.
        engine.checkpoint_engine = TorchCheckpointEngine()
        tag = f"step_{step}"
        engine.save_checkpoint(str(self.folder / DEFAULT), tag=tag)
        return self.folder / DEFAULT / tag


def trained_engine(config: RunConfig) -> Engine:
    """An engine with random weights after one step, so that the optimizer has its state."""
    from pipeline.training.engine import Engine
    from pipeline.training.load_model import build_on_device

    spec = read_spec(config.base)
    layout = Layout(RANKS)
    settings = load_deepspeed_config(config.deepspeed, layout)
    groups = ProcessGroups(layout)
    torch.manual_seed(0)
    model = build_on_device(config, BaseFolder(config.base, spec), settings, groups)
    # Random, as trained weights are: a disk may store zeros as holes.
    for parameter in model.parameters():
        held_values(parameter).detach().normal_(std=0.02)
    engine = Engine(model, config, settings, groups)
    tokens = torch.randint(spec.vocab_size, (1, SEQUENCE))
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    documents = Documents.of(torch.zeros_like(tokens))
    engine.backward(engine.loss(MicroBatch(tokens, tokens, positions, documents))[0])
    engine.end_micro_batch(1e-3)
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
        for row in measured_on_ranks(base, divisor, stage, options):
            rows.append({"base": base, **row})
    print_rows(rows)
    write_rows(options, rows)


def measured_on_ranks(
    base: str, divisor: int, stage: int, options: argparse.Namespace
) -> list[Row]:
    """The rows of a base under a ZeRO stage, from processes that end before the next are measured.

    Raises:
        SystemExit: a rank failed.
    """
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoints-") as temporary:
        folder = Path(temporary).resolve()
        write_json(folder / "config.json", narrow_base(base, divisor))
        program = ["-m", "benchmarks.checkpoint", "--measure"]
        program += [str(divisor), str(stage), str(options.rounds), str(folder)]
        if run_ranks(program, RANKS):
            raise SystemExit(f"error: {base}, ZeRO-{stage}: a rank failed; its traceback is above")
        rows: list[Row] = json.loads((folder / ROWS).read_text(encoding="utf-8"))
        return rows


if __name__ == "__main__":
    main()
