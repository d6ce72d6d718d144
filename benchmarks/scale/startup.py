"""The start of a run on many ranks: what each reads, and what rank 0 sends them.

Every rank is a thread of one process with torch's threaded process group. It does what a run does before DeepSpeed
begins: inputs, the checks of files in the preflight, hashes, and the weights of a small base.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from benchmarks.scale.growth import Row, in_own_process, opened, report
from pipeline import methods
from pipeline.checks import allocation
from pipeline.checks.door import read_inputs
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, parse_config
from pipeline.data.corpora import corpus_jobs
from pipeline.data.preprocess import preprocess
from pipeline.data.workers import Workers
from pipeline.files import shipped
from pipeline.methods.scale import upscale
from pipeline.model.from_hf import open_base
from pipeline.parallel.ranks import broadcast_from_rank0
from pipeline.parallel.topology import SINGLE
from pipeline.training import run

GOALS = {"rank0_cpu_s": 10, "other_cpu_s": 10, "small_files_a_rank": 2}
RANKS_PER_NODE = 8


def make_run(folder: Path) -> RunConfig:
    """A small run of SCALE, with its corpora and initial expansion."""
    (folder / "text.txt").write_text("".join(f"Once upon a time there were {n} cats.\n" for n in range(10_000)))
    corpus = {"input": [str(folder / "text.txt")], "heldout_fraction": 0.1}
    widths = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    values: dict[str, Any] = {"name": "startup", "folder": str(folder / "run"), "deepspeed": "ds_configs/zero1.json"}
    values |= {
        "base": str(shipped() / "data" / "models" / "stories260K"),
        "method": {"name": "scale", "variant": "preserve", "expansion": widths},
        "data": {"folder": str(folder / "tokens"), "sequence_length": 64, "corpora": {"text": corpus}},
        "schedule": {"steps": 1, "global_batch_size": 512, "micro_batch_size": 1, "learning_rate": 1e-3},
    }
    config = parse_config(values, source="here")
    for job in corpus_jobs(config.data, config.tokenizer):
        preprocess(job, Workers(None))
    upscale(ScaleMethod.model_validate(config.method), open_base(config.base), config.upscaled_folder, config.seed)
    return config


def start(config: RunConfig, ranks: int) -> Row:
    """Starts `ranks` ranks. Small files are neither weights nor tokens; they count whenever they are opened."""
    multi_threaded_pg._install_threaded_pg()
    internals: Any = torch._C._distributed_c10d
    internals._set_thread_isolation_mode(True)
    store = internals.HashStore()
    row: Row = {}

    def rank_main(rank: int) -> float:
        dist.init_process_group(backend="threaded", rank=rank, world_size=ranks, store=store)
        began = time.thread_time()
        inputs = broadcast_from_rank0(lambda: read_inputs(config, ranks))
        nodes = [f"node{number // RANKS_PER_NODE}" for number in range(ranks)]
        allocated: Any = allocation.Allocation(inputs, None, torch.device("cpu"), nodes)  # type: ignore[arg-type]
        for check in (allocation.check_same_files, allocation.check_corpora):
            assert not check(allocated).faults
        run.hash_base(inputs, SINGLE)
        inputs.method.load(methods.build_model(config, inputs.base.spec, SINGLE), inputs.base, SINGLE)
        row["broadcast_kib"] = round(len(pickle.dumps(inputs)) / 1024, 1)
        return time.thread_time() - began

    opened.clear()
    with ThreadPoolExecutor(ranks) as pool:
        seconds = list(pool.map(rank_main, range(ranks)))
    row["rank0_cpu_s"], row["other_cpu_s"] = round(seconds[0], 3), round(sum(seconds[1:]) / (ranks - 1), 3)
    small = sum(count for name, count in opened.items() if not name.endswith((".bin", ".idx")))
    return row | {"small_files_a_rank": round(small / ranks, 2)}


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of ranks."""
    config = make_run(scratch)
    counts = (2, 4) if smallest else (8, 32, 128)
    rows = [{"ranks": ranks, **in_own_process(start, config, ranks)} for ranks in counts]
    yield report(f"Start-up: ranks on nodes of {RANKS_PER_NODE}", rows, GOALS)
