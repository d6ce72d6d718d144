"""How well a language model predicts a text: nll per token, perplexity, and bits per byte, which compares tokenizers.

Documents are scored one by one, each behind what the model expects before a text (its BOS, or without one its
end-of-document token), so that every token of the text counts and no document sees another. Prompts are read only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import log
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.data.records import Document
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.log import progress_bar

# --- Cutting documents that are longer than a model's context, so that every token is scored exactly once -----------


class Window(NamedTuple):
    """The tokens [start, stop) of a sequence, of which those from `first_scored` on count."""

    start: int
    stop: int
    first_scored: int


def windows(length: int, context: int, stride: int, first_scored: int = 1) -> Iterator[Window]:
    """Windows over a sequence of `length` tokens, of which those before `first_scored`, at least one, are only read.

    Each begins `stride` tokens after the one before it, and scores what that one did not. So every scored token sees at
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


# --- How well a language model predicts a text: nll per token, pe ---

Text = Union[str, Document]
"""A text alone, or one that may stand behind a prompt."""
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
    logits: Logits, documents: Iterable[Text], tokenizer: Tokenizer, limits: Limits, *, vocab_size: int, name: str = ""
) -> Score:
    """Scores `documents`. The sum runs in their order, however they are batched.

    Raises:
        DataError: there is no document.
    """
    sequences = _encode(documents, tokenizer, limits)
    if not sequences:
        raise DataError(
            f"{name}: holds no document to score; give another file, or with --text-key the field that holds its text"
        )
    cut = [
        (one.ids, window)
        for one in sequences
        for window in windows(len(one.ids), limits.context, limits.stride, one.first_scored)
    ]
    # Batches of about equal lengths waste little on padding.
    nll = [0.0] * len(cut)
    order = sorted(range(len(cut)), key=lambda index: cut[index][1].start - cut[index][1].stop)
    with progress_bar(name, len(cut), " windows") as bar:
        for batch in _batches(order, cut, min(_BATCH_TOKENS, _BATCH_LOGITS // vocab_size)):
            for index, value in zip(batch, _batch_nll(logits, [cut[index] for index in batch]), strict=True):
                nll[index] = value
            bar.update(len(batch))
    tokens = sum(len(one.ids) - one.first_scored for one in sequences)
    size = sum(one.bytes for one in sequences)
    total = math.fsum(nll)
    return Score(
        documents=len(sequences),
        tokens=tokens,
        bytes=size,
        nll_per_token=total / tokens,
        perplexity=math.exp(total / tokens),
        bits_per_byte=total / math.log(2) / size,
    )


class _Sequence(NamedTuple):
    """The tokens of a document, those from `first_scored` on to be scored, which are so many bytes of text."""

    ids: Tensor
    first_scored: int
    bytes: int


def _encode(documents: Iterable[Text], tokenizer: Tokenizer, limits: Limits) -> list[_Sequence]:
    """The documents within the limits."""
    first = list(tokenizer.document_start or tokenizer.document_end)[-1:]
    sequences: list[_Sequence] = []
    room = limits.max_tokens or sys.maxsize
    share = max(limits.context, room // 32)
    for document in documents:
        if room <= 0 or len(sequences) == limits.max_documents:
            break
        text, prompt = (document, None) if isinstance(document, str) else (document.text, document.prompt)
        read = first if prompt is None else first + tokenizer.reference.encode([prompt]).ids.tolist()
        ids = tokenizer.reference.encode([text]).ids.tolist()
        if len(ids) > share:
            # The text itself is cut, so that the bytes are those of what is scored.
            text = text[: max(1, len(text) * share // len(ids))]
            ids = tokenizer.reference.encode([text]).ids.tolist()
        room -= len(ids)
        sequences.append(_Sequence(torch.tensor(read + ids), len(read), len(text.encode())))
    return sequences


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


# --- Scoring a Hugging Face folder on corpora -----------------------------------------------------------------------

# Longer windows are asked for by --context: their logits take gigabytes where the vocabulary is large.
DEFAULT_CONTEXT = 4096
_logger = log.get_logger(__name__)


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
    """The score of the model in `folder` on each corpus of documents, on a GPU where there is one.

    `context` defaults to the model's own, up to `DEFAULT_CONTEXT`; `stride` to half of it.

    Raises:
        BaseModelError: the folder holds no model that can be loaded.
        ConfigError: `context` or `stride` do not fit the model.
        DataError: it has no tokenizer, or a corpus no document.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(folder)
    longest = int(getattr(model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    context = context or min(longest, DEFAULT_CONTEXT)
    stride = stride or max(1, context // 2)
    if not 2 <= context <= longest or stride >= context:
        raise ConfigError(
            f"{folder}: windows of {context} tokens every {stride} do not fit: the context goes from 2 to the model's "
            f"{longest}, the stride below the context"
        )
    limits = Limits(context, stride, max_documents, max_tokens)
    _logger.info("%s: windows of %d tokens, every %d", folder, context, stride)

    def logits(tokens: Tensor) -> Tensor:
        found: Any = model(tokens.to(device), use_cache=False)
        scores: Tensor = found.logits
        return scores

    vocab_size = int(model.config.vocab_size)
    return {
        name: score(logits, documents, tokenizer, limits, vocab_size=vocab_size, name=name)
        for name, documents in corpora.items()
    }
