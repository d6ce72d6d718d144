"""Windows of text, and which of their tokens are new text, or left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from pipeline.data.dataset.packing import IGNORED, Sample
from pipeline.model.attention import Documents

GROUP_TOKENS = 2**15
"""How many tokens pass the model together."""
NO_KIND = -1
"""The number of the kind of text that is in a corpus of the run."""


@dataclass(frozen=True)
class Windows:
    """N windows of S tokens; every tensor is [N, S]."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor
    is_new: Tensor
    """bool: which tokens are new text"""
    is_self_generated: Tensor
    """bool: which tokens are of text that the base wrote itself"""
    present: Tensor
    """bool: which tokens are neither padding nor left out"""
    kinds: Tensor
    """int64: the number of a token's kind of text (`pipeline.extensions.gate.kinds`), or NO_KIND"""

    def __len__(self) -> int:
        return len(self.tokens)

    def groups(self) -> Iterator[Windows]:
        """Runs of windows of at most GROUP_TOKENS tokens each, and at least one window."""
        size = max(1, GROUP_TOKENS // self.tokens.shape[1])
        for first in range(0, len(self), size):
            yield self.rows(slice(first, first + size))

    def documents(self, device: torch.device) -> Documents:
        return Documents.of(self.document_ids).moved(lambda tensor: tensor.to(device))

    def rows(self, rows: slice | Tensor) -> Windows:
        """Some of the windows; rows: a slice, or a mask [N]."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in vars(self).items():
            tensors[name] = tensor[rows]
        return Windows(**tensors)

    def without_new_kind(self, is_open: Tensor) -> Windows:
        """These windows without self-generated documents that are mostly of the new text's kind.

        A base that knows a little of the new language writes in it now and then. That is not text
        to stay closed on. is_open: bool [N, S], the tokens that look new.
        """
        return replace(
            self, present=self.present & ~(self.is_self_generated & self.mostly(is_open))
        )

    def without_tokens_from(self, first: int) -> Windows:
        """These windows without ids from `first` on."""
        return replace(self, present=self.present & (self.tokens < first))

    def without_kinds(self, kinds: Sequence[int]) -> Windows:
        """These windows without text of some kinds."""
        left_out = torch.isin(self.kinds, torch.tensor(kinds, dtype=torch.long))
        return replace(self, present=self.present & ~left_out)

    def self_generated_ids(self, is_open: Tensor) -> Tensor:
        """The ids of self-generated text, without tokens that look new: [T].

        A base that knows a little of the new language writes words of it in other text too.
        is_open: bool [N, S], the tokens that look new.
        """
        return self.tokens[self.present & self.is_self_generated & ~is_open]

    def given_negative_ids(self) -> Tensor:
        """The ids of text that is neither new nor self-generated: [T]."""
        return self.tokens[self.present & ~self.is_new & ~self.is_self_generated]

    def mostly(self, is_open: Tensor) -> Tensor:
        """The tokens of documents of which most present tokens are open: bool [N, S]."""
        # document_ids count from 0 in each window, and a window has at most S documents: with
        # row * S added, each document of all windows has a number of its own.
        length = self.tokens.shape[1]
        first = torch.arange(len(self)).unsqueeze(1) * length
        document = (first + self.document_ids).flatten()

        present = torch.zeros(self.tokens.numel())
        present.index_add_(0, document, self.present.flatten().float())
        opened = torch.zeros(self.tokens.numel())
        opened.index_add_(0, document, (self.present & is_open).flatten().float())
        return (opened > present / 2)[document].view_as(self.tokens)


def as_windows(
    samples: Sequence[Sample], *, is_new: bool, is_self_generated: bool = False
) -> Windows:
    """Samples of S tokens as windows.

    Args:
        samples: at least one.
        is_new: whether all of them are new text; if not, all are other text.
        is_self_generated: whether the base wrote them.
    """
    present = torch.from_numpy(np.stack([_present(sample) for sample in samples]))
    return Windows(
        tokens=_stacked(samples, "tokens"),
        targets=_stacked(samples, "targets"),
        positions=_stacked(samples, "positions"),
        document_ids=_stacked(samples, "document_ids"),
        is_new=torch.full_like(present, is_new),
        is_self_generated=torch.full_like(present, is_self_generated),
        present=present,
        kinds=torch.full(present.shape, NO_KIND),
    )


def _stacked(samples: Sequence[Sample], name: str) -> Tensor:
    """One array of all samples: [N, S]."""
    return torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))


def _present(sample: Sample) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which tokens are no padding: bool [S].

    Samples do not say where their padding is. It is a last document of one token, repeated, with
    nothing to predict. A document of a single token at the end of a sample is taken for padding
    too.
    """
    last = sample.document_ids == sample.document_ids[-1]
    predicts_nothing = (sample.targets[last] == IGNORED).all()
    is_one_token = (sample.tokens[last] == sample.tokens[-1]).all()
    present: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = np.ones_like(last)
    if predicts_nothing and is_one_token:
        present = ~last
    return present


def joined(parts: Sequence[Windows]) -> Windows:
    """The windows of all parts, one after the other."""
    tensors: dict[str, Tensor] = {}
    for field in fields(Windows):
        tensors[field.name] = torch.cat([getattr(part, field.name) for part in parts])
    return Windows(**tensors)
