"""How well a language model predicts a text: nll per token, perplexity, and bits per byte, which compares tokenizers.

Documents are scored one by one, each behind what the model expects before a text (its BOS, or without one its
end-of-document token), so that every token of the text counts and no document sees another.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError
from pipeline.evaluation.windows import Window, windows

Logits = Callable[[Tensor], Tensor]
"""Tokens [B, S], padded on the right -> logits [B, S, V]."""

# A batch holds at most so many logits, 512 MiB in fp32, and no more tokens than keep a small model in the caches.
_BATCH_LOGITS = 2**27
_BATCH_TOKENS = 2**13


@dataclass(frozen=True)
class Limits:
    """How much is scored, and in which windows.

    `context` is the length of a window and `stride` the distance between two. Documents are taken from the beginning of
    the corpus until one of `max_documents` and `max_tokens` is reached; so that a few long ones do not use `max_tokens`
    up, each gives its beginning only, a 32nd of it or a context.
    """

    context: int
    stride: int
    max_documents: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Score:
    """A model on a corpus. `bytes` is the UTF-8 length of what was scored."""

    documents: int
    tokens: int
    bytes: int
    nll_per_token: float
    perplexity: float
    bits_per_byte: float

    def as_json(self) -> dict[str, Any]:
        """For `write_json`."""
        return asdict(self)


def score(
    logits: Logits, documents: Iterable[str], tokenizer: Tokenizer, limits: Limits, *, vocab_size: int, name: str = ""
) -> Score:
    """Scores `documents`. The sum runs in their order, however they are batched.

    Raises:
        DataError: there is no document.
    """
    texts, sequences = _encode(documents, tokenizer, limits)
    if not sequences:
        raise DataError(f"{name}: holds no document to score; give another file")
    cut = [(ids, window) for ids in sequences for window in windows(len(ids), limits.context, limits.stride)]
    # Batches of about equal lengths waste little on padding.
    nll = [0.0] * len(cut)
    order = sorted(range(len(cut)), key=lambda index: cut[index][1].start - cut[index][1].stop)
    with tqdm(total=len(cut), desc=name, unit=" windows", leave=False, disable=None) as bar:
        for batch in _batches(order, cut, min(_BATCH_TOKENS, _BATCH_LOGITS // vocab_size)):
            for index, value in zip(batch, _batch_nll(logits, [cut[index] for index in batch]), strict=True):
                nll[index] = value
            bar.update(len(batch))
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    size = sum(len(text.encode()) for text in texts)
    total = math.fsum(nll)
    return Score(
        documents=len(sequences),
        tokens=tokens,
        bytes=size,
        nll_per_token=total / tokens,
        perplexity=math.exp(total / tokens),
        bits_per_byte=total / math.log(2) / size,
    )


def _encode(documents: Iterable[str], tokenizer: Tokenizer, limits: Limits) -> tuple[list[str], list[Tensor]]:
    """The documents within the limits, and their tokens behind the one that is only read."""
    first = list(tokenizer.document_start or tokenizer.document_end)[-1:]
    texts: list[str] = []
    sequences: list[Tensor] = []
    room = limits.max_tokens or sys.maxsize
    share = max(limits.context, room // 32)
    for text in documents:
        if room <= 0 or len(texts) == limits.max_documents:
            break
        ids = tokenizer.reference.encode([text]).ids.tolist()
        if len(ids) > share:
            # The text itself is cut, so that the bytes are those of what is scored.
            text = text[: max(1, len(text) * share // len(ids))]
            ids = tokenizer.reference.encode([text]).ids.tolist()
        room -= len(ids)
        texts.append(text)
        sequences.append(torch.tensor(first + ids))
    return texts, sequences


def _batches(order: Sequence[int], cut: Sequence[tuple[Tensor, Window]], batch_tokens: int) -> Iterator[list[int]]:
    """Runs of `order`, whose windows only get shorter, of at most `batch_tokens` tokens with their padding."""
    batch: list[int] = []
    for index in order:
        longest = cut[batch[0] if batch else index][1]
        if batch and (len(batch) + 1) * (longest.stop - longest.start) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch


@torch.no_grad()
def _batch_nll(logits: Logits, batch: Sequence[tuple[Tensor, Window]]) -> list[float]:
    """The summed nll of each window's scored tokens."""
    rows = [sequence[window.start : window.stop] for sequence, window in batch]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    found = logits(tokens)
    sums = []
    for row, (sequence, window) in enumerate(batch):
        first = window.first_scored - window.start
        last = window.stop - window.start
        targets = sequence[window.first_scored : window.stop].to(found.device)
        nll = F.cross_entropy(found[row, first - 1 : last - 1].float(), targets, reduction="none")
        sums.append(float(nll.double().sum()))
    return sums
