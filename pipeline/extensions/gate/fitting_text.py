"""The windows of a run's corpora that its gate is fitted on: new, not new, and spliced of both."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from pipeline.config.gate import GateSettings
from pipeline.config.run import RunConfig
from pipeline.data.dataset.blend import Permutation, mix
from pipeline.data.dataset.samples import open_packed
from pipeline.errors import DataError
from pipeline.extensions.gate.splices import spliced
from pipeline.extensions.gate.windows import Windows, as_windows, joined


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
            fit=self.fit.without_tokens_from(first), unused=self.unused.without_tokens_from(first)
        )


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
