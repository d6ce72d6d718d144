"""Documents of labelled pieces of text, packed into windows as corpora are, and read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.data.dataset.packing import Sample, pack
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.extensions.gate.windows import NO_KIND, Windows, as_windows


class Piece(NamedTuple):
    """Some ids of a document, the number of their kind of text, and whether they are new text."""

    ids: Sequence[int]
    kind: int = NO_KIND
    is_new: bool = False


class Packer(NamedTuple):
    """Cuts documents into windows, as `pipeline.data.dataset.packing` cuts corpora."""

    tokenizer: Tokenizer
    sequence_length: int
    document_mask: bool

    def windows(self, documents: Sequence[Sequence[Piece]]) -> Windows | None:
        """The windows of all documents, in their order; None if there are none."""
        if not documents:
            return None
        # Without a start token, a document's first token is the end of the one before it.
        begins_with_end = not self.tokenizer.document_start
        before = Piece(self.tokenizer.before_document if begins_with_end else ())
        pieces = [before]
        starts: list[int] = []
        length = len(before.ids)
        for document in documents:
            starts.append(length - len(before.ids))
            framed = [
                Piece(self.tokenizer.document_start, document[0].kind, document[0].is_new),
                *document,
                Piece(self.tokenizer.document_end, document[-1].kind, document[-1].is_new),
            ]
            pieces += framed
            length += sum(len(piece.ids) for piece in framed)

        ids = np.concatenate([np.array(piece.ids, dtype=np.int64) for piece in pieces])
        samples: list[Sample] = []
        for first in range(0, length - len(before.ids), self.sequence_length):
            window = ids[first : first + self.sequence_length + 1]
            samples.append(self._sample(window, np.array(starts, dtype=np.int64) - first))
        windows = as_windows(samples, is_new=False)
        is_new = _labels([piece.is_new for piece in pieces], pieces, windows, False)
        kinds = _labels([piece.kind for piece in pieces], pieces, windows, NO_KIND)
        return replace(windows, is_new=is_new.bool(), kinds=kinds)

    def _sample(self, window: np.ndarray, starts: np.ndarray) -> Sample:
        """A sample; documents begin at `starts`, counted from its first token."""
        if not self.document_mask:
            starts = starts[:0]
        return pack(
            window,
            starts,
            self.sequence_length,
            padding=self.tokenizer.document_end[-1],
            begins_with_end=not self.tokenizer.document_start,
        )


def _labels(
    of_pieces: Sequence[int], pieces: Sequence[Piece], windows: Windows, padding: int
) -> Tensor:
    """A label of each piece, as one of each of its tokens: int64 [N, S]."""
    lengths = [len(piece.ids) for piece in pieces]
    labels = np.repeat(np.array(of_pieces, dtype=np.int64), lengths)
    whole = np.full(windows.tokens.numel(), padding, dtype=np.int64)
    count = min(len(labels), len(whole))
    whole[:count] = labels[:count]
    return torch.from_numpy(whole).view(windows.tokens.shape)


def document_texts(windows: Windows, tokenizer: Tokenizer) -> Iterator[str]:
    """The texts of the windows, without special tokens between documents."""
    for row in range(len(windows)):
        for document in windows.document_ids[row].unique():
            is_document = (windows.document_ids[row] == document) & windows.present[row]
            ids: list[int] = []
            for token in windows.tokens[row][is_document].tolist():
                if token not in tokenizer.reference.added_ids:
                    ids.append(token)
            yield tokenizer.decode(ids)
