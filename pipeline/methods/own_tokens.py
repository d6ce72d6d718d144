"""Which tokens of a run get rows of their own: those that are frequent enough to be learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config.method import Lora, OpenRows, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.corpus.manifest import MANIFEST
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.corpora import Job, corpus_jobs, is_heldout
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenize.input_files import is_here
from pipeline.data.tokenize.token_counts import frequent_tokens, too_rare
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.errors import ConfigError

_JUDGED_TOKENS = 2**20
"""In how much text a `min_count` is sought before the expansion is made."""


def own_tokens_of(
    config: RunConfig, vocab_size: int, *, tokenizer_fingerprint: str
) -> tuple[int, ...] | None:
    """The ids that get rows of their own in the run; None for methods without open rows.

    Raises:
        ConfigError: no token is as frequent as `method.open_rows.min_count` asks.
        DataError: a corpus of role new is not tokenized yet, or by another tokenizer, or holds an
            id for which neither the base nor the run's vocabulary has a row.
    """
    method = config.method
    if not isinstance(method, (ScaleMethod, Lora)) or method.open_rows is None:
        return None
    if not isinstance(method.open_rows, OpenRows):
        return tuple(range(vocab_size))
    return frequent_tokens(
        config,
        vocab_size,
        method.open_rows.min_count,
        setting="method.open_rows.min_count",
        tokenizer_fingerprint=tokenizer_fingerprint,
    )


def check_min_count(config: RunConfig, vocab_size: int, tokenizer: Tokenizer) -> None:
    """Checks that the new text is not too little for open rows, before the expansion is made.

    Text on the hub, and more than a million tokens, is not judged.

    Raises:
        ConfigError: no token is as frequent as `method.open_rows.min_count` asks.
        DataError: a text or a corpus cannot be read.
    """
    method = config.method
    if not isinstance(method, (ScaleMethod, Lora)) or not isinstance(method.open_rows, OpenRows):
        return
    min_count = method.open_rows.min_count
    jobs = []
    for job in corpus_jobs(config.data, config.tokenizer):
        if job.corpus.role == "new" and job.part == "train":
            jobs.append(job)
    if not all(is_here(job.corpus.input) for job in jobs):
        return
    counts = np.zeros(vocab_size, dtype=np.int64)
    judged = 0
    for job in jobs:
        for ids in _ids_of(job, tokenizer):
            counts += np.bincount(ids, minlength=vocab_size)[:vocab_size]
            judged += len(ids)
            if counts.max() >= min_count or judged > _JUDGED_TOKENS:
                return
    raise ConfigError(too_rare("method.open_rows.min_count", int(counts.max()), min_count))


def _ids_of(job: Job, tokenizer: Tokenizer) -> Iterator[npt.NDArray[Any]]:
    """The ids of a corpus, or of its text where it is not tokenized yet, some at a time."""
    if (job.output / MANIFEST).exists():
        corpus = TokenCorpus(job.output, tokenizer_fingerprint=tokenizer.fingerprint)
        for start in range(0, corpus.tokens, _JUDGED_TOKENS):
            yield corpus.read(start, min(start + _JUDGED_TOKENS, corpus.tokens))
        return
    for document in good_documents(job.corpus.input, job.keys):
        if not is_heldout(document.held_out_by, job.corpus.heldout_fraction):
            ids = tokenizer.reference.encode([document.whole_text]).ids
            yield np.concatenate([tokenizer.document_start, ids, tokenizer.document_end]).astype(
                int
            )
