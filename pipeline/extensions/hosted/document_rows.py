"""A document a row, for bases in which documents of one row would see each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.extensions.hosted.structure import DocumentSeparation
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.paths import TokenBatch


@dataclass(frozen=True)
class DocumentRows:
    """A batch as the base gets it, and where its tokens stood.

    Attributes:
        batch: the batch as it was, or with a row for each document.
        places: int64 [B·S], the index of each token of the original batch among those of `batch`;
            None where nothing was moved.
    """

    batch: TokenBatch
    places: Tensor | None = None

    @classmethod
    def of(cls, batch: TokenBatch, separation: DocumentSeparation) -> DocumentRows:
        """`batch` in rows that the base keeps apart."""
        documents = batch.documents
        if separation != "one_document" or documents is None or max(documents.per_row) == 1:
            return cls(batch)
        starts = documents.starts.tolist()  # a GPU waits here, once a micro-batch
        lengths = [stop - start for start, stop in pairwise(starts)]
        flat = batch.tokens.flatten()
        # Padding follows the text: nothing that is causal reads it.
        tokens = pad_sequence(list(flat.split(lengths)), batch_first=True)
        positions = None
        if batch.positions is not None:
            of_documents = list(batch.positions.flatten().split(lengths))
            positions = pad_sequence(of_documents, batch_first=True)
        places: list[Tensor] = []
        for row, length in enumerate(lengths):
            first = row * tokens.shape[1]
            places.append(torch.arange(first, first + length, device=flat.device))
        return cls(TokenBatch(tokens, positions, None), torch.cat(places))

    def restored(self, hidden: HiddenStates) -> HiddenStates:
        """The hidden states of `batch`, one token a row, in the order of the original tokens."""
        if self.places is None:
            return hidden
        return hidden.rows(self.places)
