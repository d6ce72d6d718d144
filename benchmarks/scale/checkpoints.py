"""Checkpoints of many data-parallel ranks: their index, a rank's restore at half the ranks, conversion, and removal.

Files have true headers and sparse values. ZeRO-3 cuts each parameter over all ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.scale.growth import Row, in_own_process, measured, report
from pipeline.checkpoint import folder as folders
from pipeline.checkpoint.manifest import CHECKPOINT
from pipeline.checkpoint.rank_files import CheckpointReader, Kind, rank_file, read_index
from pipeline.config.method import ExpansionWidths, ScaleMethod
from pipeline.methods import method_for
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import read_spec
from pipeline.parallel.sharding import named_trained_parameters
from pipeline.parallel.topology import SINGLE

GOALS = {"index_cpu_s": 60, "restore_files": 8, "restore_peak_mib": 1024, "convert_peak_mib": 8192, "remove_s": 5}


def model(base: str) -> Decoder:
    """The structure of the model on a base, widened by an eighth."""
    with torch.device("meta"):
        spec = read_spec(Path("configs") / "bases" / f"{base}.json")
        names = ("hidden_size", "intermediate_size", "num_attention_heads")
        widths = ExpansionWidths(**{name: getattr(spec.widths, name) // 8 for name in names})
        settings = ScaleMethod(name="scale", variant="preserve", expansion=widths)
        return method_for(settings, Path(), 0).build(spec, SINGLE, "none")


def make_checkpoint(folder: Path, base: str, ranks: int) -> None:
    """The files of all ranks."""
    folder.mkdir(parents=True)
    sizes = {name: parameter.numel() for name, parameter in named_trained_parameters(model(base))}
    for rank in range(ranks):
        header: dict[str, Any] = {}
        first, end = {}, 0
        for name, count in sizes.items():
            length = min(-(-count // ranks), count - (start := min(count, rank * -(-count // ranks))))
            if length:
                first[name] = start
                for kind in get_args(Kind):
                    span = [end, end := end + 4 * length]
                    header[f"{name}/{kind}"] = {"dtype": "F32", "shape": [length], "data_offsets": span}
        header["adam_step"] = {"dtype": "F32", "shape": [], "data_offsets": [end, end + 4]}
        header["__metadata__"] = {"layout": json.dumps({"tp_rank": 0, "tp_size": 1, "first": first})}
        text = json.dumps(header).encode()
        with rank_file(folder, rank).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end + 4)
    (folder / CHECKPOINT.record).write_text(json.dumps({"format": CHECKPOINT.format}))


def read(folder: Path, base: str, ranks: int) -> Row:
    """What rank 0 does before a resume, what the middle one of `ranks` ranks then reads, and what conversion reads."""
    row: Row = {}
    structure = model(base)
    own = dict(named_trained_parameters(structure))
    with measured(row, "index_"):
        index = read_index(folder)
    row["broadcast_mib"] = round(len(pickle.dumps(index)) / 2**20, 2)
    with measured(row, "restore_"):
        reader = CheckpointReader(index, structure)
        for (name, parameter), kind in product(own.items(), get_args(Kind)):
            length = -(-parameter.numel() // ranks)
            span = (ranks // 2 * length, min(parameter.numel(), (ranks // 2 + 1) * length))
            if span[0] < span[1]:
                reader.read_span(name, kind, 0, 1, span)
    del reader
    with measured(row, "convert_"):
        reader, done = CheckpointReader(index, structure), 0
        for name, parameter in sorted(own.items(), key=lambda item: -item[1].numel()):
            if (done := done + 4 * parameter.numel()) < 2**32:  # a sample
                reader.read(name)
    return row


def remove(folder: Path) -> Row:
    """What a save does with a superseded checkpoint where removing a file takes 5 ms."""
    unlink = os.unlink

    def slow_unlink(*arguments: Any, **named: Any) -> None:  # noqa: ANN401
        time.sleep(0.005)
        unlink(*arguments, **named)

    os.unlink = slow_unlink
    began = time.monotonic()
    folders.discard(folder)
    return {"remove_s": round(time.monotonic() - began, 2)}


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of ranks."""
    base = "llama-3.2-1b" if smallest else "llama-3.1-70b"
    rows = []
    for ranks in (2, 4) if smallest else (256, 512, 1024):
        folder = scratch / "step_00000001"
        make_checkpoint(folder, base, ranks)
        row: Row = {"ranks": ranks, **in_own_process(read, folder, base, ranks // 2)}
        rows.append(row | in_own_process(remove, folder))
        assert not folder.exists()
    yield report(f"Checkpoints: under ZeRO-3 on {base}, resumed at half the ranks", rows, GOALS)
