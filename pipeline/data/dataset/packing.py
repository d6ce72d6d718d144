"""Samples of fixed length, cut from a token corpus."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.corpus.token_corpus import TokenCorpus

IGNORED = -100
"""The target where nothing is predicted."""


class Sample(NamedTuple):
    """A sequence of S tokens; all arrays are int64 [S] except the last.

    Attributes:
        tokens: what the model reads.
        targets: the next token of each, or IGNORED where nothing is predicted.
        positions: counted from the beginning of the document, or of the sample if the document
            began before it.
        document_ids: 0, 1, ... within the sample; attention does not cross documents.
        answer_starts: bool [S]; where the target is the first token after a prompt.
    """

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int64]
    answer_starts: npt.NDArray[np.bool_]


class PackedCorpus:
    """A corpus cut into samples of `sequence_length` (S); each token is predicted exactly once.

    Sample k reads the tokens from k·S to (k+1)·S; the last one is padded. With `whole_documents`
    each sample holds as many whole documents as fit and is padded, so that an answer stays with its
    prompt.

    With `begins_with_end` the end-of-document token is both the last target of its document and the
    first token that the next one sees: what bases read before a document if their tokenizer has no
    start token (docs/evaluation.md).
    """

    def __init__(
        self,
        source: TokenCorpus,
        sequence_length: int,
        *,
        padding: int,
        document_mask: bool,
        whole_documents: bool = False,
        begins_with_end: bool = False,
    ) -> None:
        self.source = source
        self.sequence_length = sequence_length
        self._padding = padding
        self._document_mask = document_mask
        self._begins_with_end = begins_with_end
        # Samples of whole documents begin one token early, with the end of the document before.
        self._overlap = int(begins_with_end and whole_documents)
        self._cuts: Sequence[int] | npt.NDArray[np.int64] = range(0, source.tokens, sequence_length)
        if whole_documents:
            self._cuts = _cuts_between_documents(source, sequence_length - self._overlap)

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = max(0, int(self._cuts[index]) - self._overlap)
        stop = self.source.tokens
        if index + 1 < len(self):
            stop = int(self._cuts[index + 1])
        if stop - start == self.sequence_length and not self._overlap:
            # The target of the last token that is read.
            stop = min(stop + 1, self.source.tokens)
        starts = np.zeros(0, dtype=np.int64)
        if self._document_mask:
            # With `begins_with_end` a document begins a token earlier, with the end of the one
            # before it.
            starts = self.source.document_starts(start, stop) - start - int(self._begins_with_end)
        return pack(
            self.source.read(start, stop),
            starts,
            self.sequence_length,
            padding=self._padding,
            prompts=self.source.prompt_mask(start, stop),
            begins_with_end=self._begins_with_end,
        )


def pack(
    window: npt.NDArray[Any],
    document_starts: npt.NDArray[np.int64],
    sequence_length: int,
    *,
    padding: int,
    prompts: npt.NDArray[np.bool_] | None = None,
    begins_with_end: bool = False,
) -> Sample:
    """Makes a sample of up to S + 1 consecutive tokens.

    Args:
        window: the tokens, one more than the sample reads; fewer where the sample is padded.
        document_starts: the positions in `window` at which a document begins, ascending. If none is
            given, the sample is one continuous text, and only padding is separate.
        sequence_length: S.
        padding: the token to pad with; it is never predicted, and is a document of its own.
        prompts: which tokens of `window` are read but never predicted; None if there are none.
        begins_with_end: a document's first token is the end of the one before it, and is predicted
            there.
    """
    # Tokens that are read; the others of the sample are padding.
    present = min(len(window), sequence_length)
    tokens = np.full(sequence_length, padding, dtype=np.int64)
    tokens[:present] = window[:present]
    # Shifted here, once: the model predicts `targets` as they are, unlike transformers' `labels`.
    targets = np.full(sequence_length, IGNORED, dtype=np.int64)
    targets[: len(window) - 1] = window[1:]

    # Positions from 1 to S at which another document, or padding, begins. The token before a border
    # has no target within its own document.
    borders = document_starts[(document_starts > 0) & (document_starts <= sequence_length)]
    if present < sequence_length:
        borders = np.append(borders[borders < present], present)
    if not begins_with_end:
        # A document's first token cannot be predicted from another document, which attention does
        # not see.
        targets[borders - 1] = IGNORED
    answer_starts = np.zeros(sequence_length, dtype=np.bool_)
    if prompts is not None:
        targets[: len(window) - 1][prompts[1:]] = IGNORED
        # Where the token is of the prompt, and its target is not.
        answer_starts[: len(window) - 1] = prompts[:-1] & ~prompts[1:]

    inner = borders[borders < sequence_length]
    starts_here = np.zeros(sequence_length, dtype=np.int64)
    starts_here[inner] = 1
    document_ids = np.cumsum(starts_here)
    # Each position less that at which its document begins.
    begins = np.concatenate([[0], inner])
    positions = np.arange(sequence_length, dtype=np.int64) - begins[document_ids]
    return Sample(tokens, targets, positions, document_ids, answer_starts)


def _cuts_between_documents(source: TokenCorpus, sequence_length: int) -> npt.NDArray[np.int64]:
    """Where samples begin if each holds as many whole documents as fit.

    A document longer than a sample starts a new one and continues in the next, followed by other
    documents.
    """
    borders = [*source.document_starts(0, source.tokens).tolist(), source.tokens]
    cuts = [0]
    while True:
        furthest = cuts[-1] + sequence_length
        if furthest >= source.tokens:
            return np.array(cuts, dtype=np.int64)
        last_border = borders[bisect.bisect_right(borders, furthest) - 1]
        is_in_one_document = last_border <= cuts[-1]
        cuts.append(furthest if is_in_one_document else last_border)
