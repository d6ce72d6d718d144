"""The start of a run on many ranks, and a step of one of them: what each reads, holds and sends.

At the start every rank is a thread of one process with torch's threaded process group. It does what
a run does before DeepSpeed begins: inputs, the checks of files in the preflight, hashes, and the
weights of a small base. The step is rank 0's: the run's own model, DeepSpeed's engine and
optimizer, under torch's fake tensors and fake process group.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from benchmarks.recorded_steps import COLLECTIVES, payloads, simulated_steps
from benchmarks.results import BASES, STORIES, Row, adapt_run
from benchmarks.scale.growth import in_own_process, opened, report
from pipeline.checks.checklist import check_stage
from pipeline.checks.preflight.allocation import Allocation
from pipeline.checks.preflight.input_files import check_corpora, check_same_files
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.tokenize.corpora import corpus_jobs
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import Workers
from pipeline.methods.build_model import build_model
from pipeline.methods.scale import upscale
from pipeline.model import base_folder
from pipeline.model.base_folder import SINGLE_FILE
from pipeline.model.from_hf import open_base
from pipeline.parallel.ranks import broadcast_from_rank0
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.sizing.traffic import GATHER
from pipeline.training.base_copies import hash_base

RANKS_PER_NODE = 8
_PARTS = ("inputs", "preflight", "base")
"""What a run does before DeepSpeed begins, in order; rank 0 does more of it than the others."""
TERMS = ("weights", "gradients", "optimizer", "forward", "rest", "peak")
"""What a GPU's memory holds, as the estimate names it."""
GOALS: dict[str, float] = {"small_files_a_rank": 2, "messages_error": 0.0, "gathers_error": 0.15}
for _part in _PARTS:
    GOALS |= {f"{_part}_rank0_cpu_s": 10, f"{_part}_other_cpu_s": 10}
for _term in TERMS:
    GOALS[f"{_term}_error"] = 0.05


def make_run(folder: Path) -> RunConfig:
    """A small run, with its corpora and initial expansion."""
    lines = [f"There were {number} cats.\n" for number in range(20_000)]
    (folder / "text.txt").write_text("".join(lines))
    config = adapt_run(folder, STORIES, zero=1, sequences=512)
    for job in corpus_jobs(config.data, config.tokenizer):
        preprocess(job, Workers(None))
    upscale(
        ScaleMethod.model_validate(config.method),
        open_base(config.base),
        config.initial_expansion_folder,
        config.seed,
    )
    return config


def start(config: RunConfig, ranks: int) -> Row:
    """Starts `ranks` ranks as threads of this process.

    Small files are neither weights nor tokens; they count whenever they are opened.
    """
    multi_threaded_pg._install_threaded_pg()
    internals: Any = torch._C._distributed_c10d
    internals._set_thread_isolation_mode(True)
    row: Row = {}
    store = internals.HashStore()
    open_weights = vars(base_folder)["safe_open"]
    values = [object()] * ranks
    together = threading.Barrier(ranks)

    def count_and_open(file: Path, **named: str) -> Any:
        # safetensors opens files in Rust, which no audit hook of Python sees.
        opened[file.name] += 1
        return open_weights(file, **named)

    def rank_main(rank: int) -> list[float]:
        dist.init_process_group(backend="threaded", rank=rank, world_size=ranks, store=store)
        times = [time.thread_time()]
        inputs = broadcast_from_rank0(lambda: check_stage(config, ranks, "train"))
        row["broadcast_kib"] = round(len(pickle.dumps(inputs)) / 1024, 1)
        times.append(time.thread_time())
        nodes = [f"node{number // RANKS_PER_NODE}" for number in range(ranks)]
        device = torch.device("cpu")
        # The checks below take the default process group; no other is made before DeepSpeed begins.
        no_groups: Any = None
        allocated = Allocation(inputs, no_groups, device, nodes)
        for check in (check_same_files, check_corpora):
            assert not check(allocated).faults
        times.append(time.thread_time())
        hash_base(inputs)
        inputs.method.load(build_model(config, inputs.base.spec, SINGLE), inputs.base, SINGLE)
        return [*times, time.thread_time()]

    def all_gather(found: list[object], own: object, group: object = None) -> None:
        values[dist.get_rank()] = own
        # Torch's threads would each pickle the objects of all: that is no cost of a rank.
        together.wait()
        found[:] = values
        # No thread may write its next object before all have read this one.
        together.wait()

    vars(base_folder)["safe_open"] = count_and_open
    vars(dist)["all_gather_object"] = all_gather
    opened.clear()
    with ThreadPoolExecutor(ranks) as pool:
        times = list(pool.map(rank_main, range(ranks)))
    # [parts, ranks]: the processor time of each thread alone.
    seconds = np.diff(times).T.tolist()
    for part, (first, *others) in zip(_PARTS, seconds, strict=True):
        row[f"{part}_rank0_cpu_s"] = round(first, 3)
        row[f"{part}_other_cpu_s"] = round(sum(others) / len(others), 3)
    weights = opened[SINGLE_FILE]
    tokens = 0
    for name, times_opened in opened.items():
        if name.endswith((".bin", ".idx")):
            tokens += times_opened
    row["base_opened_a_node"] = round(weights * RANKS_PER_NODE / ranks)
    row["small_files_a_rank"] = round((opened.total() - weights - tokens) / ranks, 2)
    return row


def compare(scratch: Path, base: str, zero: int, tp_size: int, gpus: int, layers: int) -> Row:
    """What rank 0 of a base with `layers` holds at most and sends in a step, and how far the
    estimate is from it."""
    # Few layers: by how much a cost grows with them says what more layers would take.
    described = json.loads((BASES / f"{base}.json").read_text())
    described["num_hidden_layers"] = layers
    path = scratch / "config.json"
    path.write_text(json.dumps(described))
    config = adapt_run(scratch, path, zero, gpus // tp_size, tp_size)
    estimator = open_estimator(config, Cluster(gpus=gpus))
    estimate = estimator.estimate(estimator.own_choice)
    found = simulated_steps(config, gpus)
    held = Counter(found["held"])
    # What the simulated step does not tell apart: the loss, and what lives for a moment.
    held["rest"] = held["peak"] - sum(held[term] for term in TERMS[:4])
    memory = estimate.memory
    expected = {
        **vars(memory),
        "forward": memory.activations + memory.gathered,
        "rest": memory.loss + memory.temporary,
        "peak": memory.total,
    }
    row: Row = {}
    for term in TERMS:
        row[f"{term}_gib"] = round(held[term] / 2**30, 3)
        row[f"{term}_error"] = round(abs(expected[term] / held[term] - 1), 4)
    row["start_gib"] = round(payloads(found["start"]).total() / 2**30, 3)
    sent = payloads(found["messages"])
    row["sent_gib"] = round(sent.total() / 2**30, 3)
    for traffic in estimate.traffic:
        # Gathers of ZeRO-3 are estimated, and have a goal of their own; all other messages follow
        # from the sizes.
        name = "gathers_error" if traffic.purpose == GATHER else "messages_error"
        measured = sent.pop((COLLECTIVES[traffic.collective], traffic.group_size))
        error = round(abs(traffic.payload_bytes / measured - 1), 4)
        row[name] = max(error, row.get(name, 0.0))
    assert not sent, "the estimate has them all"
    return row


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of ranks, and one over the layers of each of two bases, at two stages
    of ZeRO."""
    # The base, its layers, the ZeRO stage, the tensor-parallel size, and the GPUs.
    counts: tuple[int, ...] = (8, 32, 128)
    steps = [("llama-3.1-8b", (8, 32), 2, 8, 1024), ("llama-3.1-70b", (5, 10), 3, 8, 128)]
    if smallest:
        counts = (2, 4)
        steps = [("llama-1m", (2, 4), 2, 2, 8), ("llama-1m", (2, 4), 3, 2, 8)]
    ranks = partial(in_own_process, start, make_run(scratch))
    yield report(f"Start-up: ranks on nodes of {RANKS_PER_NODE}", "ranks", counts, ranks, GOALS)
    for base, layers, zero, tp_size, gpus in steps:
        title = (
            f"A step: {base} under ZeRO-{zero}, tp {tp_size}, {gpus:,} GPUs, against the estimate"
        )
        row = partial(in_own_process, compare, scratch, base, zero, tp_size, gpus)
        yield report(title, "layers", layers, row, GOALS)
