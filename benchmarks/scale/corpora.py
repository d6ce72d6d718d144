"""A token corpus of many shards: what a rank needs to open it, to read a sample anywhere in it, and to check it.

Every shard has true indexes and hashes. Its ids are zeros, of which a sparse file holds any number. All shards are
links to a few files, since a file system allows no file more than some ten thousand names.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.scale.growth import LINKS, Row, in_own_process, measured, report
from pipeline.config.data import Data
from pipeline.data.jobs import Plan, UnitPart, check_finished, manifest_of
from pipeline.data.samples import TrainingSamples
from pipeline.data.token_corpus import MANIFEST, InputFile, TokenCorpus, TokenizerRecord
from pipeline.data.token_shards import token_dtype, writing_shard

SEQUENCE, RANKS = 8192, 1024
GOALS = {"open_cpu_s": 5, "open_resident_mib": 200, "first_sample_ms": 10}
_TOKENIZER = TokenizerRecord(
    fingerprint="none", vocab_size=128_256, document_start=[], document_end=[0], backend="none"
)


def make_corpus(folder: Path, shards: int, documents: int, tokens: int) -> None:
    """A corpus of `shards` equal shards, each of an input file of its own."""
    folder.mkdir(parents=True)
    dtype = token_dtype(_TOKENIZER.vocab_size)
    parts: dict[str, UnitPart] = {}
    for number in range(shards):
        name = f"{number:05d}-000000"
        if number % LINKS == 0:
            first = folder / name
            with writing_shard(first, dtype) as writer:
                writer.add(np.zeros(tokens, dtype), np.full(documents, tokens // documents))
            os.truncate(first.with_suffix(".bin"), 0)
            os.truncate(first.with_suffix(".bin"), tokens * dtype.itemsize)
            part = UnitPart(documents=documents, tokens=tokens, files=writer.files)
        else:
            for end in part.files:
                os.link(first.with_suffix(end), folder / f"{name}{end}")
        parts[name] = part
    inputs = [InputFile(path=f"/texts/{name}.jsonl.zst", bytes=4 * tokens, sha256=f"{name:>064}") for name in parts]
    plan = Plan(tokenizer=_TOKENIZER, text_key="text", inputs=[], unit_size=1)
    manifest_of(plan, "train", parts, inputs).save(folder)


def read(folder: Path) -> Row:
    """What a rank does until its first batches, then `inspect-data`, and a rank's share of the preflight."""
    row: Row = {"manifest_mib": round((folder / "corpus" / MANIFEST).stat().st_size / 2**20, 4)}
    corpora = {"corpora": {"corpus": {"input": ["made here"]}}}
    data = Data.model_validate({"folder": folder, "sequence_length": SEQUENCE, **corpora})
    with measured(row, "open_"):
        samples = TrainingSamples(data, seed=1, tokenizer_fingerprint=None)
    corpus = TokenCorpus(folder / "corpus")
    first, *others = random.Random(2).sample(range(corpus.tokens // SEQUENCE), 33)
    times = [time.process_time()]
    for indices in ([first], others):
        for index in indices:
            samples[index]
        times.append(time.process_time())
    row["first_sample_ms"] = round(1000 * (times[1] - times[0]), 3)
    row["later_sample_ms"] = round(1000 * (times[2] - times[1]) / len(others), 3)
    with measured(row, "inspect_"):
        check_finished(folder / "corpus")
    with measured(row, "preflight_"):
        corpus.check(blocks=1, share=(0, RANKS))
    return row


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of shards, and one over the documents of each."""
    counts = (5, 10) if smallest else (25_000, 50_000, 100_000)
    tokens, documents = (100_000, 1_000) if smallest else (10_000_000, 10_000)

    def row(size: str, number: int, shards: int, documents: int) -> Row:
        folder = scratch / f"{number}-{size}"
        make_corpus(folder / "corpus", shards, documents, tokens)
        return {size: number, **in_own_process(read, folder)}

    by_shards = [row("shards", shards, shards, documents) for shards in counts]
    yield report(f"Corpora: shards of {tokens:,} tokens in {documents:,} documents", by_shards, GOALS)
    by_documents = [row("documents_a_shard", documents // n, counts[0], documents // n) for n in (100, 10, 1)]
    yield report(f"Corpora: {counts[0]:,} shards of {tokens:,} tokens", by_documents, GOALS)
