"""What a long run of many ranks writes: checkpoints, and the metrics of a million steps.

Checkpoints have files with true headers and sparse values: their index, the restore of a rank at
half the ranks, conversion, and removal. Metrics: status, report, and resuming.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.results import BASES, Row, adapt_run
from benchmarks.scale.growth import in_own_process, measured, report
from pipeline.checkpoint import folder as folders
from pipeline.checkpoint.manifest import CHECKPOINT
from pipeline.checkpoint.rank_files import CheckpointReader, Span, Stored, rank_file, read_index
from pipeline.methods.build_model import build_model
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import read_spec
from pipeline.observers.metrics import MetricsFiles
from pipeline.parallel.parameters import named_trained_parameters
from pipeline.parallel.topology import SINGLE
from pipeline.run_folder.metrics import METRICS
from pipeline.run_folder.status import read_status
from pipeline.sizing.traffic import partition_size
from pipeline.training.observer import StepEvent
from studies.report.page import page
from studies.report.results import read_runs

GOALS: dict[str, float] = {
    "index_cpu_s": 60,
    "restore_files": 8,
    "restore_peak_mib": 1024,
    "convert_peak_mib": 8192,
    "remove_s": 5,
    "status_cpu_s": 1,
    "report_cpu_s": 30,
    "report_peak_mib": 1000,
    "resume_cpu_s": 1,
    "resume_peak_mib": 100,
}
# They make a line of half a kilobyte, as gradient norms of many groups do.
_FIGURES = {f"norm/{number:02d}": 1.23456789 for number in range(21)}
_SCORES = {
    "perplexity/ko": 1.23456789,
    "perplexity/en": 1.23456789,
    "bits_per_byte/ko": 1.23456789,
    "bits_per_byte/en": 1.23456789,
}


def model(base: str) -> CausalDecoder:
    """The structure of the model on a base, widened by an eighth."""
    config = adapt_run(Path(), BASES / f"{base}.json", zero=3, sequences=1)
    with torch.device("meta"):
        return build_model(config, read_spec(config.base), SINGLE)


def partition(
    sizes: dict[str, int], zero: int, rank: int, ranks: int
) -> Iterator[tuple[str, Span]]:
    """What `rank` holds of each parameter, as the first element and the one past the last.

    ZeRO-3 cuts each parameter over all ranks. ZeRO-2 lays all of them one after another, and cuts
    the row: most ranks hold parts of few parameters.
    """
    total = sum(sizes.values())
    # Where the parameter begins in what is cut.
    begin = 0
    for name, size in sizes.items():
        part = partition_size(size if zero == 3 else total, ranks)
        first = max(0, rank * part - begin)
        last = min(size, (rank + 1) * part - begin)
        if first < last:
            yield name, (first, last)
        if zero < 3:
            begin += size


def make_checkpoint(folder: Path, base: str, zero: int, ranks: int) -> None:
    """The files of all ranks, in the format of safetensors, their values holes in sparse files."""
    folder.mkdir(parents=True)
    sizes = trained_sizes(model(base))
    for rank in range(ranks):
        header, end = _header(dict(partition(sizes, zero, rank, ranks)))
        text = json.dumps(header).encode()
        # The length of the header in 8 bytes, the header, and the values.
        with rank_file(folder, rank).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / CHECKPOINT.record).write_text(json.dumps({"format": CHECKPOINT.format}))


def _header(spans: dict[str, Span]) -> tuple[dict[str, Any], int]:
    """The header of a rank's file with these spans, and the bytes of its values."""
    header: dict[str, Any] = {}
    firsts: dict[str, int] = {}
    end = 0
    for name, (first, last) in spans.items():
        firsts[name] = first
        for kind in get_args(Stored):
            begin = end
            end += 4 * (last - first)
            header[f"{name}/{kind}"] = {
                "dtype": "F32",
                "shape": [last - first],
                "data_offsets": [begin, end],
            }
    header["adam_step"] = {"dtype": "F32", "shape": [], "data_offsets": [end, end + 4]}
    layout = {"tp_rank": 0, "tp_size": 1, "first": firsts}
    header["__metadata__"] = {"layout": json.dumps(layout)}
    return header, end + 4


def trained_sizes(structure: CausalDecoder) -> dict[str, int]:
    """The elements of each trained parameter."""
    sizes: dict[str, int] = {}
    for name, parameter in named_trained_parameters(structure):
        sizes[name] = parameter.numel()
    return sizes


def read_checkpoint(folder: Path, base: str, zero: int, ranks: int) -> Row:
    """What rank 0 does before a resume, what the middle one of `ranks` ranks then reads, and what
    conversion reads."""
    structure = model(base)
    sizes = trained_sizes(structure)
    row: Row = {}
    with measured(row, "index_"):
        index = read_index(folder)
    row["broadcast_mib"] = round(len(pickle.dumps(index)) / 2**20, 2)
    with measured(row, "restore_"):
        reader = CheckpointReader(index, structure)
        for name, span in partition(sizes, zero, ranks // 2, ranks):
            for kind in get_args(Stored):
                reader.read_span(name, kind, 0, 1, span)
    # With the files that it holds open: conversion begins with none.
    del reader
    with measured(row, "convert_"):
        reader = CheckpointReader(index, structure)
        # The largest parameters first, whose memory is the peak, until 4 GiB are read.
        read = 0
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            read += 4 * sizes[name]
            if read < 2**32:
                reader.read(name)
    return row


def remove(folder: Path) -> Row:
    """What a save does with a superseded checkpoint where removing a file takes 5 ms."""
    unlink = os.unlink

    def unlink_slowly(path: Any, **options: Any) -> None:
        time.sleep(0.005)
        unlink(path, **options)

    # As on a parallel file system, whose metadata server answers each call. This process ends after
    # it.
    os.unlink = unlink_slowly
    began = time.monotonic()
    folders.discard(folder)
    assert not folder.exists()
    return {"remove_s": round(time.monotonic() - began, 2)}


def make_metrics(folder: Path, steps: int) -> None:
    """A run folder with a line for each step."""
    folder.mkdir(parents=True)
    common = {
        "loss": 2.345678,
        "learning_rate": 3e-4,
        "tokens_per_second_per_gpu": 12345.6,
        **_FIGURES,
    }
    # The text of a line after its step: a million calls of the encoder would take minutes.
    plain = json.dumps(common)[1:]
    validated = json.dumps({**common, **_SCORES, "forgetting/en": 0.01})[1:]
    every = max(1, steps // 1000)
    with (folder / METRICS).open("w", encoding="ascii") as file:
        for step in range(steps + 1):
            rest = plain if step % every else validated
            file.write(f'{{"step": {step}, {rest}\n')


def read_metrics(folder: Path, steps: int) -> Row:
    """What status, report, and rank 0 do: it resumes 100 steps back, and then is at a step.

    Status is `scale-cpt status`, report `python -m studies report`.
    """
    row: Row = {"metrics_mib": round((folder / METRICS).stat().st_size / 2**20, 1)}
    with measured(row, "status_"):
        read_status(folder)
    with measured(row, "report_"):
        page(read_runs([folder]), "report")
    with measured(row, "resume_"):
        metrics = MetricsFiles(folder, steps - 100)
    with measured(row, "a_step_"):
        metrics.on_step(StepEvent(steps, 0, None, _FIGURES))
    return row


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the ranks of checkpoints, for each of two bases and stages of ZeRO, and one over
    steps."""

    def saved(base: str, zero: int, ranks: int) -> Row:
        folder = scratch / "step_00000001"
        make_checkpoint(folder, base, zero, ranks)
        row = in_own_process(read_checkpoint, folder, base, zero, ranks // 2)
        return row | in_own_process(remove, folder)

    def logged(steps: int) -> Row:
        folder = scratch / str(steps)
        make_metrics(folder, steps)
        return in_own_process(read_metrics, folder, steps)

    counts: tuple[int, ...] = (256, 512, 1024)
    steps: tuple[int, ...] = (250_000, 500_000, 1_000_000)
    bases = [("llama-3.1-8b", 2), ("llama-3.1-70b", 3)]
    if smallest:
        counts = (2, 4)
        steps = (1_000, 2_000, 4_000)
        bases = [("llama-1m", 2), ("llama-1m", 3)]
    for base, zero in bases:
        title = f"Checkpoints: {base} under ZeRO-{zero}, resumed at half the ranks"
        yield report(title, "ranks", counts, partial(saved, base, zero), GOALS)
    yield report("Metrics: a line for each step", "steps", steps, logged, GOALS)
