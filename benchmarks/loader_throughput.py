"""How fast samples are read from disk in the random order of training.

    python -m benchmarks.loader_throughput --json benchmarks/out/loader.json

`warm`: the corpus is in the page cache. `cold`: it was dropped from the cache (posix_fadvise), and no two samples read
the same pages. `first_sample_at_1e9_s`: opening the corpus and reading the sample at index 10**9. One process, one
thread, samples as training gets them: tokens, targets, positions and document ids, as int64. The corpus is made here,
of random ids in documents of about 500 tokens.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.results import Row, make_parser, print_rows, write_rows
from pipeline.config.data import Data
from pipeline.data.jobs import Plan, UnitPart, manifest_of
from pipeline.data.samples import TrainingSamples
from pipeline.data.token_corpus import TokenizerRecord
from pipeline.data.token_shards import token_dtype, writing_shard

_SHARD_TOKENS = 16_000_000
_MEAN_DOCUMENT = 500
_TOKENIZER = TokenizerRecord(
    fingerprint="none", vocab_size=128_256, document_start=[], document_end=[0], backend="none"
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64_000_000, help="size of the corpus (default: 64 million)")
    parser.add_argument("--sequence-lengths", type=int, nargs="+", default=[512, 2048, 8192], metavar="S")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement (default: 2)")
    parser.add_argument("--scratch", type=Path, help="folder for the temporary corpus")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="loader-", dir=options.scratch) as scratch:
        _make_corpus(Path(scratch) / "corpus", options.tokens)
        rows = [_measure(Path(scratch), length, options.seconds) for length in options.sequence_lengths]
    print_rows(rows)
    write_rows(options, rows)


def _measure(folder: Path, sequence_length: int, seconds: float) -> Row:
    """Tokens per second, by kind of read."""
    corpora = {"corpus": {"input": ["made here"]}}
    data = Data.model_validate({"folder": folder, "sequence_length": sequence_length, "corpora": corpora})
    began = time.perf_counter()
    TrainingSamples(data, seed=1, tokenizer_fingerprint=None)[10**9]
    first = time.perf_counter() - began
    for path in folder.rglob("*.*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    samples = TrainingSamples(data, seed=1, tokenizer_fingerprint=None)
    cold = _rate(samples, sequence_length, seconds)
    for path in folder.rglob("*.*"):
        path.read_bytes()
    return {
        "sequence_length": sequence_length,
        "first_sample_at_1e9_s": first,
        "cold_tokens_per_second": cold,
        "warm_tokens_per_second": max(_rate(samples, sequence_length, seconds) for _ in range(3)),
    }


def _rate(samples: TrainingSamples, sequence_length: int, seconds: float) -> float:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        samples[count]
        count += 1
    return count * sequence_length / (time.perf_counter() - began)


def _make_corpus(folder: Path, tokens: int) -> None:
    """A corpus of random ids, written with the same writer as real ones."""
    folder.mkdir()
    random = np.random.default_rng(0)
    shards = {}
    for number, start in enumerate(range(0, tokens, _SHARD_TOKENS)):
        documents = max(1, min(tokens - start, _SHARD_TOKENS) // _MEAN_DOCUMENT)
        lengths = random.geometric(1 / _MEAN_DOCUMENT, size=documents)
        with writing_shard(folder / f"{number:05d}", token_dtype(_TOKENIZER.vocab_size)) as writer:
            ids = random.integers(0, _TOKENIZER.vocab_size, size=int(lengths.sum()), dtype=np.int32)
            writer.add(ids, lengths)
        shards[f"{number:05d}"] = UnitPart(documents=writer.documents, tokens=writer.tokens, files=writer.files)
    plan = Plan(tokenizer=_TOKENIZER, text_key="text", inputs=[], unit_size=_SHARD_TOKENS)
    manifest_of(plan, "train", shards, []).save(folder)


if __name__ == "__main__":
    main()
