"""Estimates the number of tokens of texts from a sample, for a first configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import sampled_documents
from pipeline.data.tokenizer.chats import chat_template
from pipeline.data.tokenizer.load import Tokenizer, batches, fertility

_SAMPLE_BYTES = 2**20
_LITTLE_TEXT = 100_000_000
_REPEATED = 4
"""Texts of fewer tokens than _LITTLE_TEXT are read so many times: up to four passes are about as
good as new text (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models")."""


class TextMeasure(NamedTuple):
    """The size of a kind of text, estimated from a sample.

    Attributes:
        inputs: the files.
        tokens: the number of tokens in all files.
        tokens_per_byte: tokens for each byte of UTF-8.
        counts: how often each id occurs in the sample: [V], as far as ids occur.
    """

    inputs: list[str]
    tokens: int
    tokens_per_byte: float
    counts: npt.NDArray[np.int64]

    def share_of_frequent(self, min_count: int) -> float:
        """The share of the tokens whose ids occur `min_count` times or more in all files."""
        in_sample = max(1, int(self.counts.sum()))
        scale = self.tokens / in_sample
        frequent = self.counts[np.floor(self.counts * scale) >= min_count]
        return float(frequent.sum()) / in_sample


def measure(inputs: Sequence[str], tokenizer: Tokenizer, text_key: str = "text") -> TextMeasure:
    """Estimates the tokens of a corpus of `inputs` from a sample of it.

    Raises:
        DataError: a file is missing, or holds no text.
    """
    sample, factor = sampled_documents(inputs, Keys(text_key), _SAMPLE_BYTES)
    # The ids are the same.
    encoder = tokenizer.fast or tokenizer.reference
    counts = np.zeros(0, dtype=np.int64)
    for batch in batches(document.text for document in sample):
        of_batch = np.bincount(encoder.encode(batch).ids)
        size = max(len(counts), len(of_batch))
        counts = np.pad(counts, (0, size - len(counts)))
        counts += np.pad(of_batch, (0, size - len(of_batch)))
    tokens = int(counts.sum())
    tokens_around = len(tokenizer.document_start) + len(tokenizer.document_end)
    framed = tokens + len(sample) * tokens_around
    utf8_bytes = sum(document.utf8_bytes for document in sample)
    return TextMeasure(
        list(inputs), max(1, round(factor * framed)), tokens / max(1, utf8_bytes), counts
    )


def measure_chats(
    inputs: Sequence[str], tokenizer: Tokenizer, messages_key: str = "messages"
) -> TextMeasure:
    """Estimates the tokens of a corpus of chats, prompts included, from a sample of it.

    Raises:
        DataError: the tokenizer has no chat template, a file is missing, or no chat has an answer.
    """
    keys = Keys(messages_key, messages_key, chat=chat_template(tokenizer.path))
    sample, factor = sampled_documents(inputs, keys, _SAMPLE_BYTES)
    found = fertility(tokenizer, (document.whole_text for document in sample))
    tokens = max(1, round(factor * found.tokens))
    return TextMeasure(list(inputs), tokens, found.tokens_per_byte, np.zeros(0, dtype=np.int64))


def tokens_to_read(learned: TextMeasure) -> int:
    """The number of tokens that a run reads: little text is read several times."""
    passes = _REPEATED if learned.tokens < _LITTLE_TEXT else 1
    return passes * learned.tokens
