"""The texts on which gates are fitted and measured, and what the base writes itself."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pipeline.config.data import Sampling
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.packing import PackedCorpus, pack
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenize.workers import local_workers
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.errors import DataError
from pipeline.extensions.gate.fitting_text import FittingText
from pipeline.extensions.gate.windows import Windows, as_windows
from pipeline.extensions.self_generated.corpus import SamplingJob, plan_of, sample_corpus

_MOST_DOCUMENTS = 20_000
"""Of a file: more than --tokens asks for, so that a large file need not be read to its end."""


class Kind(NamedTuple):
    """Texts of one kind: to fit a gate on, to set its threshold on, and to measure it on."""

    fit: Sequence[str]
    unused: Sequence[str]
    test: Sequence[str]


def kind_of(file: Path, seed: int) -> Kind:
    """The documents of a file, in random order, in three parts.

    The last part is its held-out file, if it has one.
    """
    texts = _documents(file, seed)
    half = len(texts) // 2
    heldout = file.with_name(file.name.replace(".jsonl", ".heldout.jsonl", 1))
    # A name without ".jsonl" stays as it is: the file cannot be its own held-out part.
    if heldout != file and heldout.exists():
        return Kind(texts[:half], texts[half:], _documents(heldout, seed))
    # No document is in two parts: a gate that knows a document says nothing about others.
    three_quarters = 3 * half // 2
    return Kind(texts[:half], texts[half:three_quarters], texts[three_quarters:])


def _documents(file: Path, seed: int) -> list[str]:
    """The texts of a file in random order: neighbours are often of one author or subject."""
    documents = islice(good_documents([str(file)], Keys()), _MOST_DOCUMENTS)
    texts = [document.text for document in documents]
    random.Random(seed).shuffle(texts)
    return texts


def windows_of(
    texts: Iterable[str], tokenizer: Tokenizer, length: int, tokens: int, *, is_new: bool
) -> Windows:
    """A window for each text, cut to `length` tokens, until `tokens` of them count.

    What precedes a document, such as `<s>`, does not count. There may be fewer tokens in all.

    Raises:
        DataError: there is no token that counts.
    """
    start = tokenizer.before_document
    places = np.arange(length)
    samples = []
    present = []
    found = 0
    for text in texts:
        if found >= tokens:
            break
        ids = np.array([*start, *tokenizer.reference.encode([text]).ids], dtype=np.int64)
        # One document, which begins at 0.
        starts = np.zeros(1, dtype=np.int64)
        samples.append(pack(ids[:length], starts, length, padding=tokenizer.document_end[-1]))
        # Every text begins with these tokens: they say nothing about its kind.
        counts = (places >= len(start)) & (places < len(ids))
        present.append(counts)
        found += int(counts.sum())
    if not found:
        raise DataError(
            "gate_separation: expected text of every kind, found a kind without a token"
        )
    windows = as_windows(samples, is_new=is_new)
    return replace(windows, present=torch.from_numpy(np.stack(present)))


def self_generated(
    base: Path, tokenizer: Tokenizer, *, tokens: int, length: int, seed: int
) -> FittingText:
    """What the base writes, `tokens` in windows of `length`, as text that is not new."""
    with tempfile.TemporaryDirectory() as folder:
        job = SamplingJob(
            base=base,
            output=Path(folder) / "own",
            sampling=Sampling(tokens=tokens, seed=seed),
            max_tokens=length,
        )
        with local_workers(1) as workers:
            sample_corpus(job, plan_of(job), workers)
        # Packed and masked as training reads it, which fits gates of runs.
        packed = PackedCorpus(
            TokenCorpus(job.output, tokenizer_fingerprint=tokenizer.fingerprint),
            length,
            padding=tokenizer.document_end[-1],
            document_mask=True,
            begins_with_end=not tokenizer.document_start,
        )
        # Read here: the folder is removed below.
        samples = [packed[index] for index in range(len(packed))]
    # Other windows for the threshold than for the fit: on its own text a fit looks too good.
    half = len(samples) // 2
    return FittingText(
        as_windows(samples[:half], is_new=False, is_self_generated=True),
        as_windows(samples[half:], is_new=False, is_self_generated=True),
    )
