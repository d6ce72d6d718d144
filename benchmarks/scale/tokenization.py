"""Tokenization of many files, and of one very large file: planning, and resuming when 99 % is done.

The files are links to a few real ones. The records of what is done are copies of those of a real job.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.growth import LINKS, Row, in_own_process, measured, report
from pipeline.config.data import Corpus
from pipeline.data.corpora import Job
from pipeline.data.jobs import STATE
from pipeline.data.preprocess import _File, _split, plan_of, preprocess, tokenize_unit
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.workers import Workers
from pipeline.files import shipped, write_record

GOALS = {"resume_cpu_s": 60, "state_files_a_file": 2, "plan_cpu_s": 60}
JOBS, UNIT_BYTES = 64, 2**26


def job_of(texts: str, output: Path) -> Job:
    """A job over the files of a pattern."""
    return Job(Corpus(input=[texts]), shipped() / "data" / "models" / "stories260K", output, unit_bytes=UNIT_BYTES)


def make_state(folder: Path, files: int) -> None:
    """The folder that a killed job leaves, but for its shards."""
    (texts := folder / "texts").mkdir(parents=True)
    for number in range(files):
        path = texts / f"{number:06d}.txt"
        if number % LINKS == 0:
            first = path
            path.write_text("Once upon a time there was a cat.\n" * 30)
        else:
            os.link(first, path)
    job = job_of(str(texts / "*.txt"), folder / "tokens")
    (state := job.output / STATE).mkdir(parents=True)
    done = _split(job.keys, UNIT_BYTES, _File("", 0, str(first), 0))
    ranges, record = done.model_dump_json(), tokenize_unit(job, done.units[0]).model_dump_json()
    write_record(state / "plan.json", plan_of(job, load_tokenizer(job.tokenizer)))
    for number in range(files):
        own = ranges.replace(first.name, f"{number:06d}.txt").replace("00000-000000", f"{number:05d}-000000")
        (state / f"{number:05d}.ranges.json").write_text(own)
        if number % 100:
            (state / f"{number:05d}-000000.json").write_text(record)


def resume(folder: Path) -> Row:
    """What one of an array's jobs does until it begins with what is left."""
    row, listed = Row(), list[object]()
    sys.addaudithook(lambda event, of: listed.append(of) if event in ("os.listdir", "os.scandir") else None)
    workers = Workers(None)
    vars(workers)["run"] = lambda _, tasks: sys.exit() if list(tasks) else iter(())
    with measured(row, "resume_"), contextlib.suppress(SystemExit):
        preprocess(job_of(str(folder / "texts" / "*.txt"), folder / "tokens"), workers, share=(5, JOBS))
    row["listed_folders"] = len(listed)
    held, files = (sum(1 for _ in place.iterdir()) for place in (folder / "tokens" / STATE, folder / "texts"))
    return row | {"state_files_a_file": round(held / files, 2)}


def plan(path: Path, size: int) -> Row:
    """What planning a file of this size takes, of zeros in a sparse file."""
    row: Row = {}
    with path.open("wb") as file:
        file.truncate(size)
    with measured(row, "plan_"):
        record = _split(job_of(str(path), path).keys, UNIT_BYTES, _File("00000.ranges", size, str(path), 0))
    return row | {"units": len(record.units)}


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of files, and one over the size of a file."""
    rows = []
    for files in (100, 200) if smallest else (25_000, 50_000, 100_000):
        make_state(scratch / str(files), files)
        rows.append({"files": files, **in_own_process(resume, scratch / str(files))})
    yield report(f"Tokenization: files, 99 % of them done, one of {JOBS} jobs resumed", rows, GOALS)
    sizes = (2**20, 2**21) if smallest else (2**38, 2**39, 2**40)
    rows = [{"bytes": size, **in_own_process(plan, scratch / "large.txt", size)} for size in sizes]
    yield report("Tokenization: one file, planned", rows, GOALS)
