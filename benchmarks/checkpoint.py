"""The size of a checkpoint and the time to save it: ours and DeepSpeed's default, of the same engine in the same run.

    python benchmarks/checkpoint.py --json benchmarks/out/checkpoint.json

Two data-parallel ranks train one step in bf16 on a base in the proportions of a published Llama, every width divided by
the same number, and widened by the share that 256 channels have of the original. Then they save in turns: DeepSpeed's
`save_checkpoint` with its defaults, ours, and ours asynchronously. Ours syncs to disk and hashes every file; the other
does neither, so the time until its files are on disk is measured too.

A checkpoint that resumes exactly holds 12 bytes a trained parameter, whoever writes it. The default adds 2 bytes for
every parameter: it is 4 times as large only if less than 6 % are trained, as with a large base.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from pipeline.checkpoint.manifest import Position, describe_layout, describe_run
from pipeline.config.run import Checkpoints as Settings
from pipeline.config.run import RunConfig, parse_config
from pipeline.evaluation.table import table
from pipeline.files import sync, write_json
from pipeline.model.attention import Documents
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import read_spec
from pipeline.model.spec import DecoderSpec, LayerKind
from pipeline.parallel.sharding import held_values
from pipeline.parallel.topology import Layout, ProcessGroups
from pipeline.training.batches import MicroBatch

if TYPE_CHECKING:  # DeepSpeed chooses its accelerator when it is imported: on the ranks
    from pipeline.training.engine import Engine

RANKS = 2
SEQUENCE = 32
ROWS = "rows.json"
DEFAULT, OURS, ASYNCHRONOUS = "DeepSpeed's default", "ours", "ours, asynchronous"
WAYS = (DEFAULT, OURS, ASYNCHRONOUS)
NEEDED_BYTES = 12
"""Per trained parameter: its fp32 weight and two moments."""
COPY_BYTES = 2
"""Per parameter of any kind that the default saves: the copy in 16 bits."""
BASES = Path("configs") / "bases"
DIVISORS = {"llama-3.2-1b": 4, "llama-3.1-70b": 16}
ADDED_CHANNELS = 256


@dataclass(frozen=True)
class Measurement:
    """What a group of processes measures, in `folder`: a base whose every width is divided by `divisor`."""

    base: str
    divisor: int
    zero_stage: int
    rounds: int
    folder: Path

    @cached_property
    def spec(self) -> DecoderSpec:
        """The narrow base: it keeps the layers, the heads and all proportions."""
        spec = read_spec(BASES / f"{self.base}.json")
        widths = replace(
            spec.widths,
            hidden_size=spec.widths.hidden_size // self.divisor,
            intermediate_size=spec.widths.intermediate_size // self.divisor,
        )
        head_dim, vocab_size = spec.head_dim // self.divisor, spec.vocab_size // self.divisor
        # Without position embedding: its frequencies are those of whole heads.
        layers = (LayerKind(rotary=None),) * spec.num_layers
        return replace(spec, layers=layers, widths=widths, head_dim=head_dim, vocab_size=vocab_size)

    @cached_property
    def config(self) -> RunConfig:
        """A run of one sequence a rank, whose data are never read.

        Adapt, as in the paper: 256 channels, one key/value head with its query heads, and the same share of the FFN as
        of the channels; W12 in the attention above the lowest fifth of the layers.
        """
        widths, channels = self.spec.widths, ADDED_CHANNELS // self.divisor
        method = {
            "name": "scale",
            "variant": "adapt",
            "l_fp": self.spec.num_layers // 5,
            "expansion": {
                "hidden_size": channels,
                "intermediate_size": channels * widths.intermediate_size // widths.hidden_size,
                "num_attention_heads": widths.num_attention_heads // widths.num_key_value_heads,
            },
        }
        values = {
            "name": "benchmark",
            "folder": str(self.folder),
            "base": str(self.folder),
            "method": method,
            "data": {"folder": "unread", "sequence_length": SEQUENCE, "corpora": {"none": {"input": ["unread"]}}},
            "schedule": {"steps": 1, "global_batch_size": RANKS, "micro_batch_size": 1, "learning_rate": 1e-3},
            "deepspeed": f"ds_configs/zero{self.zero_stage}.json",
        }
        return parse_config(values, source="the benchmark")


def worker(rank: int, port: int, measurement: Measurement) -> None:
    """One rank; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    try:
        rows = measure(measurement)
        if rank == 0:
            write_json(measurement.folder / ROWS, rows)
    finally:
        dist.destroy_process_group()


def measure(measurement: Measurement) -> list[dict[str, Any]]:
    """One row for each way of saving."""
    engine = trained_engine(measurement)
    saver = Saver(measurement, engine)
    seconds: dict[str, list[Seconds]] = {way: [] for way in WAYS}
    size: dict[str, int] = {}
    for step in range(1, measurement.rounds + 2):
        for way in WAYS:
            taken, saved = saver.save(way, step)
            size[way] = sum(file.stat().st_size for file in saved.iterdir())
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(measurement.folder / way)
            if step > 1:  # the first is a warm-up
                seconds[way].append(taken)
    trained = engine.trainable_parameters
    return [
        {
            "base": measurement.base,
            "base_parameters": engine.total_parameters - trained,
            "trainable_parameters": trained,
            "zero_stage": measurement.zero_stage,
            "way": way,
            "bytes": size[way],
            "size_to_needed": size[way] / (NEEDED_BYTES * trained),
            "default_to_size": size[DEFAULT] / size[way],
            "blocked_s": statistics.median(taken.blocked for taken in seconds[way]),
            "blocked_s_min": min(taken.blocked for taken in seconds[way]),
            "blocked_s_max": max(taken.blocked for taken in seconds[way]),
            "on_disk_s": statistics.median(taken.on_disk for taken in seconds[way]),
        }
        for way in WAYS
    ]


class Seconds(NamedTuple):
    """Of one save: until training continues, and until everything is on disk."""

    blocked: float
    on_disk: float


class Saver:
    """Saves `engine` in each of the ways."""

    def __init__(self, measurement: Measurement, engine: Engine) -> None:
        from pipeline.training.checkpointing import Checkpoints

        base = BaseFolder(measurement.folder, measurement.spec)
        base.know_hashes({})
        run = describe_run(measurement.config, base, engine.model, "none")
        layout = describe_layout(Layout(RANKS), measurement.zero_stage, torch.bfloat16)
        self.folder, self.engine = measurement.folder, engine
        self.checkpoints = {
            way: Checkpoints(
                measurement.folder / way, run, layout, Settings(keep_last=1, asynchronous=way == ASYNCHRONOUS)
            )
            for way in (OURS, ASYNCHRONOUS)
        }

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
            saved = self.checkpoints[way].save(self.engine, Position(step=step, tokens_seen=0, seconds=0.0))
        dist.barrier()
        blocked = time.perf_counter() - started
        if way == DEFAULT:
            for file in sorted(saved.iterdir())[dist.get_rank() :: RANKS]:
                sync(file)
        else:
            self.checkpoints[way].finish()
        dist.barrier()
        return Seconds(blocked, time.perf_counter() - started), saved


def trained_engine(measurement: Measurement) -> Engine:
    """An engine with random weights after one step, so that the optimizer has its state."""
    from pipeline.deepspeed_config import load_deepspeed_config
    from pipeline.training.engine import Engine, build_model

    config, spec, layout = measurement.config, measurement.spec, Layout(RANKS)
    settings, groups = load_deepspeed_config(config.deepspeed, layout), ProcessGroups(layout)
    torch.manual_seed(0)
    model = build_model(config, BaseFolder(measurement.folder, spec), settings, groups)
    for parameter in model.parameters():
        held_values(parameter).detach().normal_(std=0.02)
    engine = Engine(model, config, settings, groups)
    tokens = torch.randint(spec.vocab_size, (1, SEQUENCE))
    positions, documents = torch.arange(SEQUENCE).unsqueeze(0), Documents.of(torch.zeros_like(tokens))
    engine.backward(engine.loss(MicroBatch(tokens, tokens, positions, documents))[0])
    engine.step(1e-3)
    return engine


def run_ranks(measurement: Measurement) -> list[dict[str, Any]]:
    """The rows of one base and ZeRO stage, measured in processes of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=worker, args=(rank, port, measurement)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(
            f"error: {measurement.base}, ZeRO-{measurement.zero_stage}: a rank failed; see its traceback above"
        )
    rows: list[dict[str, Any]] = json.loads((measurement.folder / ROWS).read_text(encoding="utf-8"))
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows of one base."""
    base, trained = rows[0]["base_parameters"], rows[0]["trainable_parameters"]
    print(f"{rows[0]['base']}: {base:,} parameters, trained {trained:,} ({trained / base:.1%}), bf16, {RANKS} ranks")
    header = ["ZeRO, way", "MiB", "x needed", "default / it", "blocked s", "min", "max", "on disk s"]
    names = ("size_to_needed", "default_to_size", "blocked_s", "blocked_s_min", "blocked_s_max", "on_disk_s")
    lines = [
        [f"{row['zero_stage']}, {row['way']}", f"{row['bytes'] / 2**20:.1f}", *(f"{row[name]:.3f}" for name in names)]
        for row in rows
    ]
    print(table(header, lines), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", nargs="+", choices=list(DIVISORS), default=list(DIVISORS))
    parser.add_argument("--divisor", type=int, help=f"of every width; default {DIVISORS}")
    parser.add_argument("--zero-stages", nargs="+", type=int, choices=[1, 2, 3], default=[1, 3])
    parser.add_argument("--rounds", type=int, default=5, help="timed saves a way, after a warm-up")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="on the disk to be measured")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for base in options.bases:
        of_base = []
        for stage in options.zero_stages:
            with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoints-") as folder:
                divisor = options.divisor or DIVISORS[base]
                of_base += run_ranks(Measurement(base, divisor, stage, options.rounds, Path(folder)))
        print_table(of_base)
        rows += of_base
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
