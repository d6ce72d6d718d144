"""A corpus of 10^12 tokens: resuming its tokenization, opening it, reading samples, checking it.

All shards are links to one, with true indexes and hashes. Its ids, and the text of one large file,
are zeros, of which a sparse file holds any number. The records of what is tokenized are copies of
those of a real job.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import orjson

from benchmarks.results import STORIES, Row
from benchmarks.scale.growth import in_own_process, measured, report
from pipeline.config.data import Corpus, Data
from pipeline.data.corpus.indexed_dataset import shard_file, token_dtype, writing_shard
from pipeline.data.corpus.manifest import MANIFEST, InputFile, TokenizerRecord
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.samples import TrainingSamples
from pipeline.data.sources.file_state import state_of
from pipeline.data.tokenize import job as preprocessing
from pipeline.data.tokenize.corpora import Job
from pipeline.data.tokenize.corpus_folder import CorpusPlan, check_finished, manifest_of
from pipeline.data.tokenize.job import File, FileRecord, plan_of, preprocess, split_units
from pipeline.data.tokenize.tokenize_unit import tokenize_unit
from pipeline.data.tokenize.unit_records import STATE, UnitOutcome, UnitPart
from pipeline.data.tokenize.workers import Workers
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import json_hash, write_record

GOALS: dict[str, float] = {
    "open_cpu_s": 5,
    "open_resident_mib": 200,
    "first_sample_ms": 10,
    "resume_cpu_s": 60,
    "state_files_a_file": 2,
    "plan_cpu_s": 60,
}
SEQUENCE = 8192
RANKS = 1024
JOBS = 64
UNIT_BYTES = 2**26
_TOKENIZER = TokenizerRecord(
    fingerprint="", vocab_size=128_256, document_start=[], document_end=[0], backend=""
)


def make_corpus(folder: Path, shards: int, documents: int, tokens: int) -> None:
    """A corpus of `shards` equal shards, each of an input file of its own."""
    folder.mkdir(parents=True)
    dtype = token_dtype(_TOKENIZER.vocab_size)
    with writing_shard(folder / "all", dtype) as writer:
        writer.add(np.zeros(tokens, dtype), np.full(documents, tokens // documents))
    # Emptied and extended: a hole reads as the zeros that were there, and takes no disk.
    for size in (0, tokens * dtype.itemsize):
        os.truncate(folder / "all.bin", size)
    part = UnitPart(documents=documents, tokens=tokens, files=writer.files)
    parts: dict[str, UnitPart] = {}
    inputs: list[InputFile] = []
    for number in range(shards):
        name = f"{number:05d}-000000"
        parts[name] = part
        for end in part.files:
            (folder / f"{name}{end}").symlink_to(f"all{end}")
        path = f"/texts/{name}.jsonl.zst"
        # As long as a true hash: what a manifest takes is measured.
        inputs.append(InputFile(path=path, bytes=4 * tokens, sha256=f"{name:>064}"))
    plan = CorpusPlan(tokenizer=_TOKENIZER, text_key="text", inputs=[], unit_size=1)
    manifest_of(plan, "train", parts, inputs).save(folder)


def read(folder: Path) -> Row:
    """What a rank does until its first batches, `inspect-data`, and a rank's share of preflight."""
    row: Row = {"manifest_mib": round((folder / "corpus" / MANIFEST).stat().st_size / 2**20, 4)}
    data = Data.model_validate(
        {"folder": folder, "sequence_length": SEQUENCE, "corpora": {"corpus": {"input": ["-"]}}}
    )
    with measured(row, "open_"):
        samples = TrainingSamples(data, seed=1, tokenizer_fingerprint=None)
    corpus = TokenCorpus(folder / "corpus")
    first, *others = random.Random(2).sample(range(corpus.tokens // SEQUENCE), 33)
    # The first sample also makes what the later ones share.
    for name, indices in (("first", [first]), ("later", others)):
        began = time.process_time()
        for index in indices:
            samples[index]
        row[f"{name}_sample_ms"] = round(1000 * (time.process_time() - began) / len(indices), 3)
    with measured(row, "inspect_"):
        check_finished(folder / "corpus")
    with measured(row, "preflight_"):
        corpus.check(sampled=1, share=(0, RANKS))
    return row


def job_of(texts: str, output: Path) -> Job:
    """A job over the files of a pattern."""
    return Job(Corpus(input=[texts]), STORIES, output, unit_bytes=UNIT_BYTES)


def make_state(folder: Path, files: int) -> None:
    """The folder that a killed job leaves. All shards are links to one."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(files):
        last = texts / f"{number:06d}.txt"
        last.write_text("Once upon a time there was a cat.\n" * 30)
    job = job_of(str(texts / "*.txt"), folder / "tokens")
    state = job.output / STATE
    state.mkdir(parents=True)
    done = split_units(job.keys, UNIT_BYTES, File("", 0, str(last)))
    record = tokenize_unit(job, done.units[0])
    shard = job.output / "one"
    for end in record.train.files:
        shard_file(job.output / done.units[0].name, end).rename(shard_file(shard, end))
    write_record(state / "plan.json", plan_of(job, load_tokenizer(job.tokenizer)))
    plan = file_hash(state / "plan.json")
    for number in range(files):
        name = f"{number:05d}-000000"
        text = texts / f"{number:06d}.txt"
        found = state_of(text)
        unit = replace(done.units[0], name=name, path=str(text), state=found)
        ranges = FileRecord(unit=f"{number:05d}.ranges", plan=plan, state=found, units=[unit])
        write_unsynced(state / f"{ranges.unit}.json", ranges)
        # All but each hundredth unit is done.
        if number % 100:
            write_unsynced(
                state / f"{name}.json", record.model_copy(update={"unit": name, "plan": plan})
            )
            for end in record.train.files:
                shard_file(job.output / name, end).symlink_to(shard_file(shard, end))


def write_unsynced(path: Path, record: UnitOutcome) -> None:
    """What `write_record` writes, but not flushed to the disk: there are a hundred thousand."""
    content = record.model_dump(mode="json")
    path.write_bytes(orjson.dumps(content | {"checksum": json_hash(content)}))


def resume(folder: Path) -> Row:
    """What one of an array's jobs does until it begins with what is left."""
    row: Row = {}
    listed: list[object] = []

    def count(event: str, of: object) -> None:
        if event in ("os.listdir", "os.scandir"):
            listed.append(of)

    # Listing a folder of a hundred thousand files for each of them would be the square.
    sys.addaudithook(count)
    job = job_of(str(folder / "texts" / "*.txt"), folder / "tokens")
    # The job ends where it would begin with the first unit that is left.
    ending = patch.object(preprocessing, "tokenize_unit", lambda *_: sys.exit())
    with measured(row, "resume_"), ending, contextlib.suppress(SystemExit):
        preprocess(job, Workers(None), share=(5, JOBS))
    row["listed_folders"] = len(listed)
    held = len(list((folder / "tokens" / STATE).iterdir()))
    files = len(list((folder / "texts").iterdir()))
    row["state_files_a_file"] = round(held / files, 2)
    return row


def plan(path: Path, size: int) -> Row:
    """What planning a file of this size takes, of zeros in a sparse file."""
    with path.open("wb") as file:
        file.truncate(size)
    row: Row = {}
    job = job_of(str(path), path)
    with measured(row, "plan_"):
        record = split_units(job.keys, UNIT_BYTES, File("00000.ranges", size, str(path)))
    return row | {"units": len(record.units)}


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """Tables over the files to tokenize, the size of one, and a corpus's shards and documents."""

    def resumed(files: int) -> Row:
        folder = scratch / str(files)
        make_state(folder, files)
        return in_own_process(resume, folder)

    def opened(shards: int, documents: int) -> Row:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        make_corpus(folder / "corpus", shards, documents, tokens)
        return in_own_process(read, folder)

    counts: tuple[int, ...] = (25_000, 50_000, 100_000)
    sizes: tuple[int, ...] = (2**38, 2**39, 2**40)
    tokens = 10_000_000
    documents = 10_000
    if smallest:
        counts = (100, 200)
        sizes = (2**20, 2**21)
        tokens = 100_000
        documents = 1_000

    title = f"Tokenization: files, 99 % of them done, one of {JOBS} jobs resumed"
    yield report(title, "files", counts, resumed, GOALS)
    planned = partial(in_own_process, plan, scratch / "large.txt")
    yield report("Tokenization: one file, planned", "bytes", sizes, planned, GOALS)
    title = f"Corpora: shards of {tokens:,} tokens in {documents:,} documents"
    yield report(title, "shards", counts, lambda shards: opened(shards, documents), GOALS)
    few = counts[0] // 10
    title = f"Corpora: {few:,} shards of {tokens:,} tokens"
    by_documents = (documents // 100, documents // 10, documents)
    yield report(title, "documents_a_shard", by_documents, partial(opened, few), GOALS)
