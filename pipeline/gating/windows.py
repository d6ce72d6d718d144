"""The windows of text that a gate is fitted on: new, not new, and spliced of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.config.gate import GateSettings
from pipeline.config.run import RunConfig
from pipeline.data.dataset.blend import Permutation, mix
from pipeline.data.dataset.packing import IGNORED, Sample
from pipeline.data.dataset.samples import open_packed
from pipeline.errors import DataError
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
    """int64: the number of a token's kind of text (`pipeline.gating.kinds`), or NO_KIND"""

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


class FittingText(NamedTuple):
    """Windows that a gate is fitted on, and other windows of the same text to test it.

    Attributes:
        fit, unused: these windows.
        kinds: the names of the kinds of text in them; the number of a kind is its place here.
    """

    fit: Windows
    unused: Windows
    kinds: tuple[str, ...] = ()

    def without_tokens_from(self, first: int) -> FittingText:
        """This text without ids from `first` on: new tokens, which need no gate."""
        return self._replace(
            fit=_without_tokens_from(self.fit, first),
            unused=_without_tokens_from(self.unused, first),
        )


def _without_tokens_from(windows: Windows, first: int) -> Windows:
    return replace(windows, present=windows.present & (windows.tokens < first))


def read_fitting_text(
    config: RunConfig,
    settings: GateSettings,
    tokenizer_fingerprint: str,
    sampled_fingerprint: str | None = None,
) -> FittingText:
    """The windows that the section `gate` asks for; the run's seed decides which ones.

    A corpus with fewer than `gate.tokens` tokens is divided in halves: one to fit on, and one to
    set the threshold.

    Args:
        config: the run.
        settings: its section `gate`.
        tokenizer_fingerprint: of the tokenizer that made the corpora.
        sampled_fingerprint: of the tokenizer that made self-generated corpora, where it is another.

    Raises:
        DataError: a corpus is missing, damaged, or too small to be divided.
    """
    new_names: list[str] = []
    for name, corpus in config.data.corpora.items():
        if corpus.role == "new":
            new_names.append(name)
    new = _read_corpora(new_names, config, settings, tokenizer_fingerprint, sampled_fingerprint)
    old = _read_corpora(
        config.gate_negatives, config, settings, tokenizer_fingerprint, sampled_fingerprint
    )
    fit = [old.fit, new.fit]
    if settings.splices:
        fit.append(spliced(old.fit, new.fit, config.seed))
    return FittingText(fit=joined(fit), unused=joined([old.unused, new.unused]))


def _read_corpora(
    names: Sequence[str],
    config: RunConfig,
    settings: GateSettings,
    tokenizer_fingerprint: str,
    sampled_fingerprint: str | None,
) -> FittingText:
    """The windows of the corpora `names`, all of new text or all of other text.

    A corpus gets a share of `settings.tokens` by its weight among them.
    """
    corpora = config.data.corpora
    weights = sum(corpora[name].weight for name in names)
    fit: list[Windows] = []
    unused: list[Windows] = []
    for name in names:
        corpus = corpora[name]
        fingerprint = tokenizer_fingerprint
        if corpus.sample and sampled_fingerprint is not None:
            # The base wrote it with its own tokenizer, before the vocabulary was extended.
            fingerprint = sampled_fingerprint
        packed = open_packed(config.data, name, tokenizer_fingerprint=fingerprint)
        if len(packed) < 2:
            raise DataError(
                f"{packed.source.folder}: expected at least two samples of text, to fit a gate on "
                "one and test it on the other, found one; give it more text, or leave it out of "
                "gate.negatives"
            )
        tokens = ceil(settings.tokens * corpus.weight / weights)
        # At most half: the threshold is set on windows that the weights have not seen.
        count = min(ceil(tokens / config.data.sequence_length), len(packed) // 2)
        # Samples from all over the corpus: neighbours in a file are alike.
        order = Permutation(len(packed), mix(config.seed, *name.encode()))
        samples = [packed[order[index]] for index in range(2 * count)]
        is_new = corpus.role == "new"
        is_self_generated = corpus.role == "self_generated"
        fit.append(as_windows(samples[:count], is_new=is_new, is_self_generated=is_self_generated))
        unused.append(
            as_windows(samples[count:], is_new=is_new, is_self_generated=is_self_generated)
        )
    return FittingText(fit=joined(fit), unused=joined(unused))


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


def spliced(old: Windows, new: Windows, seed: int) -> Windows:
    """Windows whose text changes in the middle of a document: from old to new, or from new to old.

    Window i is window i of the one text up to the change, and window i of the other from there on;
    the first text is old in even windows. The place of the change is random in the middle half of a
    window. One document goes on across it.
    """
    # numpy's generator gives the same numbers on every platform and device.
    random = np.random.default_rng(seed)
    length = old.tokens.shape[1]
    windows = []
    for index in range(min(len(old), len(new))):
        # Both kinds of text must be long enough for a running mean to settle.
        cut = int(random.integers(max(1, length // 4), max(2, 3 * length // 4)))
        row = slice(index, index + 1)
        if index % 2 == 0:
            windows.append(_splice(old.rows(row), new.rows(row), cut))
        else:
            windows.append(_splice(new.rows(row), old.rows(row), cut))
    return joined(windows)


def _splice(first: Windows, second: Windows, cut: int) -> Windows:
    """One window: `first` [1, S] up to the token `cut`, and `second` [1, S] from there on."""

    def both(name: str) -> Tensor:
        return torch.cat([getattr(first, name)[:, :cut], getattr(second, name)[:, cut:]], dim=1)

    # The document that `second` is in at the cut continues the one that `first` is in there, with
    # its number and its positions; later documents of `second` keep their positions.
    before = first.document_ids[:, :cut]
    after = second.document_ids[:, cut:]
    positions = second.positions[:, cut:].clone()
    continues = after == after[:, :1]
    positions[continues] += first.positions[0, cut - 1] + 1 - positions[0, 0]
    is_new = both("is_new")
    return Windows(
        tokens=both("tokens"),
        targets=both("targets"),
        positions=torch.cat([first.positions[:, :cut], positions], dim=1),
        document_ids=torch.cat([before, after - after[:, :1] + before[:, -1:]], dim=1),
        is_new=is_new,
        # Such a document is of both kinds, and none is left out.
        is_self_generated=torch.zeros_like(is_new),
        present=both("present"),
        kinds=both("kinds"),
    )


def joined(parts: Sequence[Windows]) -> Windows:
    """The windows of all parts, one after the other."""
    tensors: dict[str, Tensor] = {}
    for field in fields(Windows):
        tensors[field.name] = torch.cat([getattr(part, field.name) for part in parts])
    return Windows(**tensors)
