"""How well a language model predicts a text: nll per token, perplexity, and bits per byte, which compares tokenizers.

Documents are scored separately, each after what it follows in training (`Tokenizer.before_document`: a start token, or
else the end of another document), so that every token of the text counts and no document sees another. Prompts are read
but not scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Union

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
Prefix = Literal["document", "end", "none"]
"""What a document is scored after: what it follows in training, the end-of-document token, or nothing."""

DEFAULT_BYTES = 2**17
"""How much of each text is scored unless the caller says otherwise; 0: all."""
# Longer windows only on request (--context): with a large vocabulary their logits take gigabytes.
DEFAULT_CONTEXT = 4096
# A batch holds at most this many logits, 512 MiB in fp32, and no more tokens than keep a small model in the caches.
_BATCH_LOGITS = 2**27
_BATCH_TOKENS = 2**13
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Score:
    """A model on a corpus. `bytes` is the UTF-8 length of what was scored; `whole`: that is all of it."""

    documents: int
    tokens: int
    bytes: int
    whole: bool
    nll_per_token: float
    perplexity: float
    bits_per_byte: float


def score_folder(
    folder: Path,
    corpora: Mapping[str, Iterable[Text]],
    *,
    context: int | None = None,
    stride: int | None = None,
    max_bytes: int = 0,
    prefix: Prefix = "document",
    trust_remote_code: bool = False,
) -> dict[str, Score]:
    """The score of the model in `folder` on each corpus of documents, on a GPU if there is one.

    Windows of `context` tokens (default: the model's own, up to `DEFAULT_CONTEXT`) begin every `stride` tokens (half
    of that). About `max_bytes` of each corpus are scored (0: all), of each document at most a 16th of it: as a limit of
    text it is the same for every tokenizer.

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
    read = prefix_of(tokenizer, prefix)
    after = tokenizer.decode(read) if read else "nothing"
    _logger.info("%s: windows of %d tokens, every %d; documents follow %s", folder, context, stride, after)

    def logits(tokens: Tensor) -> Tensor:
        return model(tokens.to(device), use_cache=False).logits

    def scored(name: str, documents: Iterable[Text]) -> Score:
        sequences, whole = _encode(documents, tokenizer, read, max_bytes)
        if not sequences:
            raise DataError(
                f"{name}: holds no document to score; give another file, or with --text-key the field that holds its "
                "text"
            )
        if (highest := max(int(one.ids.max()) for one in sequences)) >= (vocab_size := int(model.config.vocab_size)):
            raise DataError(f"{tokenizer.path}: gives the id {highest}, but the model's vocab_size is {vocab_size}")
        total = _total_nll(logits, sequences, context, stride, min(_BATCH_TOKENS, _BATCH_LOGITS // vocab_size), name)
        tokens, size = sum(len(one.ids) - one.first_scored for one in sequences), sum(one.bytes for one in sequences)
        nll = total / tokens
        return Score(len(sequences), tokens, size, whole, nll, perplexity(nll), total / math.log(2) / size)

    return {name: scored(name, documents) for name, documents in corpora.items()}


def prefix_of(tokenizer: Tokenizer, prefix: Prefix) -> tuple[int, ...]:
    """The ids that a text is read after."""
    return {"document": tokenizer.before_document, "end": tokenizer.document_end[-1:], "none": ()}[prefix]


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


def _encode(
    documents: Iterable[Text], tokenizer: Tokenizer, prefix: Sequence[int], max_bytes: int
) -> tuple[list[_Sequence], bool]:
    """The documents within the limit, each after `prefix`, and whether these are all."""
    sequences: list[_Sequence] = []
    left, share, whole = max_bytes, -(-max_bytes // 16), True
    for document in documents:
        if max_bytes and left <= 0:
            return sequences, False
        text, prompt = (document, None) if isinstance(document, str) else (document.text, document.prompt)
        if max_bytes and len(content := text.encode()) > share:
            # Cut the text, not the ids, so that the bytes are those of what is scored.
            text, whole = content[:share].decode(errors="ignore") or text[0], False
        read = [*prefix, *([] if prompt is None else tokenizer.reference.encode([prompt]).ids.tolist())]
        ids = tokenizer.reference.encode([text]).ids.tolist()
        left -= len(text.encode())
        skipped = 0 if read else len(tokenizer.decode(ids[:1]).encode())  # nothing predicts the first token
        if len(ids) > (not read):
            sequences.append(_Sequence(torch.tensor(read + ids), max(1, len(read)), len(text.encode()) - skipped))
    return sequences, whole


def _total_nll(
    logits: Logits, sequences: Sequence[_Sequence], context: int, stride: int, batch_tokens: int, name: str
) -> float:
    """The summed nll of what is scored, in the order of the documents, however they are batched."""
    cut = [
        (one.ids, window) for one in sequences for window in windows(len(one.ids), context, stride, one.first_scored)
    ]
    nll = [0.0] * len(cut)
    with progress_bar(name, len(cut), " windows") as bar:
        for batch in _batches([window for _, window in cut], batch_tokens):
            for index, value in zip(batch, _batch_nll(logits, [cut[index] for index in batch]), strict=True):
                nll[index] = value
            bar.update(len(batch))
    return math.fsum(nll)


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
