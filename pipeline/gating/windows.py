"""The windows of text that a gate is fitted on: new text, text that is not new, and windows spliced of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.config.run import GateSettings, RunConfig
from pipeline.data.dataset.blend import Permutation, mix
from pipeline.data.dataset.packing import IGNORED, Sample
from pipeline.data.dataset.samples import open_packed
from pipeline.errors import DataError
from pipeline.model.attention import Documents

GROUP_TOKENS = 2**15
"""How many tokens pass the model together."""


@dataclass(frozen=True)
class Windows:
    """N windows of S tokens; every tensor is [N, S]."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor
    is_new: Tensor
    is_own: Tensor
    """which tokens the base wrote itself"""
    present: Tensor
    """which are neither padding nor left out"""

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
        return Windows(*(tensor[rows] for tensor in vars(self).values()))

    def without_tokens_from(self, first: int) -> Windows:
        """The same without the tokens from that id on: new tokens, on which no gate decides."""
        return replace(self, present=self.present & (self.tokens < first))

    def without_new_kind(self, is_open: Tensor) -> Windows:
        """The same without the documents of which the base wrote most in the new text's kind; is_open: bool [N, S].

        A base that knows a little of the new language writes in it now and then. That is not text to stay closed on.
        """
        return replace(self, present=self.present & ~(self.is_own & self.mostly(is_open)))

    def mostly(self, is_open: Tensor) -> Tensor:
        """The tokens of documents of which most tokens are open: bool [N, S]."""
        rows = torch.arange(len(self)).unsqueeze(1) * self.tokens.shape[1]
        document = (rows + self.document_ids).flatten()
        tokens, opened = (
            torch.zeros(self.tokens.numel()).index_add_(0, document, mask.flatten().float())
            for mask in (self.present, self.present & is_open)
        )
        return (opened > tokens / 2)[document].view_as(self.tokens)


class FittingText(NamedTuple):
    """What a gate is fitted on (`fit`), and other windows of the same corpora, for its threshold (`unused`)."""

    fit: Windows
    unused: Windows


def read_fitting_text(
    config: RunConfig,
    settings: GateSettings,
    tokenizer_fingerprint: str,
    sampled_fingerprint: str | None = None,
) -> FittingText:
    """The windows that the section `gate` asks for; which they are depends on the run's seed.

    Of a corpus that is too small, half of the windows are to fit on. The fingerprints are those of `TrainingSamples`.
    Raises DataError if a corpus is missing, damaged, or too small to be divided.
    """
    corpora, length = config.data.corpora, config.data.sequence_length
    names = {
        True: [name for name, corpus in corpora.items() if corpus.role == "new"],
        False: config.gate_negatives,
    }
    parts: dict[bool, list[FittingText]] = {True: [], False: []}
    for is_new, of_kind in names.items():
        weights = sum(corpora[name].weight for name in of_kind)
        for name in of_kind:
            made_with = (
                sampled_fingerprint if corpora[name].sample else None
            ) or tokenizer_fingerprint
            packed = open_packed(config.data, name, tokenizer_fingerprint=made_with)
            if len(packed) < 2:
                raise DataError(
                    f"{packed.source.folder}: expected at least two samples of text, to fit a gate on one and test it "
                    "on the other, found one; give it more text, or leave it out of gate.negatives"
                )
            wanted = ceil(ceil(settings.tokens * corpora[name].weight / weights) / length)
            count = min(wanted, len(packed) // 2)
            order = Permutation(len(packed), mix(config.seed, *name.encode()))
            is_own = corpora[name].role == "self_generated"
            samples = [packed[order[index]] for index in range(2 * count)]
            halves = (
                as_windows(half, is_new=is_new, is_own=is_own)
                for half in (samples[:count], samples[count:])
            )
            parts[is_new].append(FittingText(*halves))
    old, new = (joined([part.fit for part in parts[is_new]]) for is_new in (False, True))
    fit = [old, new, *([spliced(old, new, config.seed)] if settings.splices else [])]
    return FittingText(
        joined(fit), joined([part.unused for is_new in (False, True) for part in parts[is_new]])
    )


def as_windows(samples: Sequence[Sample], *, is_new: bool, is_own: bool = False) -> Windows:
    """Samples of S tokens as windows, all of new text or all of other text, which the base may have written."""
    columns: Mapping[str, Tensor] = {
        name: torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("tokens", "targets", "positions", "document_ids")
    }
    present = torch.from_numpy(np.stack([_present(sample) for sample in samples]))
    kinds = {"is_new": torch.full_like(present, is_new), "is_own": torch.full_like(present, is_own)}
    return Windows(**columns, **kinds, present=present)


def _present(sample: Sample) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which tokens are no padding, which is a last document of one token, repeated, with nothing to predict.

    A document of a single token at the end of a sample is taken for padding too.
    """
    last = sample.document_ids == sample.document_ids[-1]
    is_padding = (sample.targets[last] == IGNORED).all() and (
        sample.tokens[last] == sample.tokens[-1]
    ).all()
    padded: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (
        ~last if is_padding else np.ones_like(last)
    )
    return padded


def spliced(old: Windows, new: Windows, seed: int) -> Windows:
    """Windows whose text changes in the middle of a document: from old to new, and from new to old, by turns.

    Window i ends where it changes with window i of the other; the place is random in its middle half. One document goes
    on across the change.
    """
    random = np.random.default_rng(seed)
    length, made = old.tokens.shape[1], []
    for index in range(min(len(old), len(new))):
        cut, row = (
            int(random.integers(max(1, length // 4), max(2, 3 * length // 4))),
            slice(index, index + 1),
        )
        first, second = (part.rows(row) for part in ((old, new) if index % 2 == 0 else (new, old)))
        cats = {
            name: torch.cat([getattr(first, name)[:, :cut], getattr(second, name)[:, cut:]], dim=1)
            for name in ("tokens", "targets", "is_new", "present")
        }
        before, after = first.document_ids[:, :cut], second.document_ids[:, cut:]
        positions = second.positions[:, cut:].clone()
        # The second text's first document continues the first text's last one.
        positions[after == after[:, :1]] += first.positions[0, cut - 1] + 1 - positions[0, 0]
        made.append(
            Windows(
                **cats,
                is_own=torch.zeros_like(
                    cats["is_new"]
                ),  # such a document is of both kinds, and none is left out
                positions=torch.cat([first.positions[:, :cut], positions], dim=1),
                document_ids=torch.cat([before, after - after[:, :1] + before[:, -1:]], dim=1),
            )
        )
    return joined(made)


def joined(parts: Sequence[Windows]) -> Windows:
    return Windows(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))
