"""How well a language model predicts a text: nll per token, perplexity, and bits per byte, which compares tokenizers.

Documents are scored separately, each after what the model expects before a text (its BOS, or else its end-of-document
token), so that every token of the text counts and no document sees another. Prompts are read but not scored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import log
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.data.records import Document
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.log import progress_bar
from pipeline.model.output import perplexity

Text = Union[str, Document]
"""A text alone, or one that may have a prompt."""
Logits = Callable[[Tensor], Tensor]
"""Tokens [B, S], padded on the right -> logits [B, S, V]."""

# Longer windows only on request (--context): with a large vocabulary their logits take gigabytes.
DEFAULT_CONTEXT = 4096
# A batch holds at most this many logits, 512 MiB in fp32, and no more tokens than keep a small model in the caches.
_BATCH_LOGITS = 2**27
_BATCH_TOKENS = 2**13
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Limits:
    """How much is scored, and in which windows.

    `context` is the length of a window in tokens and `stride` the distance between two. Documents are taken from the
    beginning of the corpus until `max_documents` or `max_tokens` is reached. So that `max_tokens` covers more than a
    few long documents, at most a 32nd of it, or a context, is scored of each.
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


def score_folder(
    folder: Path,
    corpora: Mapping[str, Iterable[Text]],
    *,
    context: int | None = None,
    stride: int | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Score]:
    """The score of the model in `folder` on each corpus of documents, on a GPU if there is one.

    `context` defaults to the model's own, up to `DEFAULT_CONTEXT`; `stride` to half of it.

    Raises:
        BaseModelError: the folder holds no model that can be loaded.
        ConfigError: `context` or `stride` do not fit the model.
        DataError: the folder has no tokenizer, or a corpus no document.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(folder)
    longest = int(getattr(model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    context = context or min(longest, DEFAULT_CONTEXT)
    stride = stride or max(1, context // 2)
    if not 2 <= context <= longest or stride >= context:
        raise ConfigError(
            f"{folder}: windows of {context} tokens every {stride} do not fit: expected a context from 2 to the "
            f"model's {longest}, and a stride below the context"
        )
    limits = Limits(context, stride, max_documents, max_tokens)
    _logger.info("%s: windows of %d tokens, every %d", folder, context, stride)

    def logits(tokens: Tensor) -> Tensor:
        return model(tokens.to(device), use_cache=False).logits

    vocab_size = int(model.config.vocab_size)
    return {
        name: score(logits, documents, tokenizer, limits, vocab_size=vocab_size, name=name)
        for name, documents in corpora.items()
    }


def score(
    logits: Logits, documents: Iterable[Text], tokenizer: Tokenizer, limits: Limits, *, vocab_size: int, name: str = ""
) -> Score:
    """Scores `documents`. The nll is summed in their order, however they are batched.

    Raises:
        DataError: there is no document, or an id that the model has no embedding for.
    """
    sequences = _encode(documents, tokenizer, limits)
    if not sequences:
        raise DataError(
            f"{name}: holds no document to score; give another file, or with --text-key the field that holds its text"
        )
    highest = max(int(sequence.ids.max()) for sequence in sequences)
    if highest >= vocab_size:
        raise DataError(f"{tokenizer.path}: gives the id {highest}, but the model's vocab_size is {vocab_size}")
    cut = [
        (sequence.ids, window)
        for sequence in sequences
        for window in windows(len(sequence.ids), limits.context, limits.stride, sequence.first_scored)
    ]
    nll = [0.0] * len(cut)
    with progress_bar(name, len(cut), " windows") as bar:
        for batch in _batches([window for _, window in cut], min(_BATCH_TOKENS, _BATCH_LOGITS // vocab_size)):
            for index, value in zip(batch, _batch_nll(logits, [cut[index] for index in batch]), strict=True):
                nll[index] = value
            bar.update(len(batch))
    tokens = sum(len(sequence.ids) - sequence.first_scored for sequence in sequences)
    size = sum(sequence.bytes for sequence in sequences)
    total = math.fsum(nll)
    return Score(
        documents=len(sequences),
        tokens=tokens,
        bytes=size,
        nll_per_token=total / tokens,
        perplexity=perplexity(total / tokens),
        bits_per_byte=total / math.log(2) / size,
    )


class Window(NamedTuple):
    """The tokens [start, stop) of a sequence, of which those from `first_scored` on are scored."""

    start: int
    stop: int
    first_scored: int


def windows(length: int, context: int, stride: int, first_scored: int = 1) -> Iterator[Window]:
    """Windows over a sequence of `length` tokens; those before `first_scored`, at least one, are only read.

    Each window begins `stride` tokens after the last and scores what that one did not. So every scored token sees at
    least `context - stride` tokens before it, or all there are.
    """
    start = 0
    scored = first_scored
    while scored < length:
        stop = min(start + context, length)
        if stop > scored:
            yield Window(start, stop, scored)
            scored = stop
        start += stride


class _Sequence(NamedTuple):
    """The tokens `ids: [S]` of a document; those from `first_scored` on are `bytes` bytes of text."""

    ids: Tensor
    first_scored: int
    bytes: int


def _encode(documents: Iterable[Text], tokenizer: Tokenizer, limits: Limits) -> list[_Sequence]:
    """The documents within the limits."""
    first = list(tokenizer.document_start or tokenizer.document_end)[-1:]
    sequences: list[_Sequence] = []
    left = limits.max_tokens or sys.maxsize
    share = max(limits.context, left // 32)
    for document in documents:
        if left <= 0 or len(sequences) == limits.max_documents:
            break
        text, prompt = (document, None) if isinstance(document, str) else (document.text, document.prompt)
        read = first if prompt is None else first + tokenizer.reference.encode([prompt]).ids.tolist()
        ids = tokenizer.reference.encode([text]).ids.tolist()
        if len(ids) > share:
            # Cut the text, not the ids, so that the bytes are those of what is scored.
            text = text[: max(1, len(text) * share // len(ids))]
            ids = tokenizer.reference.encode([text]).ids.tolist()
        left -= len(ids)
        sequences.append(_Sequence(torch.tensor(read + ids), len(read), len(text.encode())))
    return sequences


def _batches(cut: Sequence[Window], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of windows, the longest first to need little padding, in batches of at most `batch_tokens` tokens."""
    lengths = [window.stop - window.start for window in cut]
    batch: list[int] = []
    for index in sorted(range(len(cut)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch


@torch.no_grad()
def _batch_nll(logits: Logits, batch: Sequence[tuple[Tensor, Window]]) -> list[float]:
    """The summed nll of each window's scored tokens."""
    rows = [sequence[window.start : window.stop] for sequence, window in batch]
    found = logits(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    sums = []
    for row, (sequence, window) in enumerate(batch):
        predicting = slice(window.first_scored - window.start - 1, window.stop - window.start - 1)
        targets = sequence[window.first_scored : window.stop].to(found.device)
        nll = F.cross_entropy(found[row, predicting].float(), targets, reduction="none")
        sums.append(float(nll.double().sum()))
    return sums
