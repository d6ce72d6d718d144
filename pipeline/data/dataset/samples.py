"""The samples of training and validation.

The sample at a global index is a pure function of (seed, blend, index).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.config.data import Corpus, Data, Role
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.blend import Blend, Draw, Permutation, Share, mix, tempered
from pipeline.data.dataset.packing import PackedCorpus, Sample
from pipeline.data.tokenize.corpora import has_heldout, heldout_folder, train_folder


class SampleOrder:
    """Maps a global index to a sample of a corpus, in constant time, without reading tokens.

    Every epoch of a corpus visits each of its samples once, in a random order of its own.

    Args:
        blend: which corpus is drawn when.
        lengths: the number of samples in an epoch of each corpus.
        seed: the seed of the random orders.
    """

    def __init__(self, blend: Blend, lengths: Mapping[str, int], seed: int) -> None:
        self.blend = blend
        self._lengths = dict(lengths)
        # A key for each corpus: two of the same length have different orders.
        self._keys = {name: mix(seed, *name.encode()) for name in lengths}

    def __getitem__(self, index: int) -> Draw:
        """The corpus, and the number of the sample in it, at the global `index`."""
        name, occurrence = self.blend[index]
        length = self._lengths[name]
        epoch, position = divmod(occurrence, length)
        # A new permutation in each epoch; its round keys are made from the key, so that none is
        # stored.
        order = Permutation(length, self._keys[name], epoch)
        return Draw(name, order[position])


class TrainingSamples:
    """`samples[i]` is the sample at the global index i, for 0 ≤ i < `total`.

    Args:
        data: the corpora, their proportions, and how they are packed.
        seed: the seed of the order.
        tokenizer_fingerprint: the run's; None accepts any.
        sampled_fingerprint: the base's, where the run extends its tokenizer: what the base wrote
            has its ids.

    Attributes:
        corpora: by name, cut into samples.
        total: the number of samples that the budgets allow, or None for no end.

    Raises:
        DataError: a corpus is missing, unfinished, damaged, or was made with another tokenizer.
    """

    def __init__(
        self,
        data: Data,
        *,
        seed: int,
        tokenizer_fingerprint: str | None,
        sampled_fingerprint: str | None = None,
    ) -> None:
        self.sequence_length = data.sequence_length
        self.corpora: dict[str, PackedCorpus] = {}
        for name, corpus in data.corpora.items():
            if corpus.role != "new" and data.fractions[corpus.role] == 0:
                # It is never drawn, so that it need not exist.
                continue
            fingerprint = tokenizer_fingerprint
            if corpus.sample is not None and sampled_fingerprint is not None:
                fingerprint = sampled_fingerprint
            self.corpora[name] = open_packed(data, name, tokenizer_fingerprint=fingerprint)

        # The temperature changes proportions within a role alone: the fractions divide the roles.
        factors = dict.fromkeys(self.corpora, 1.0)
        if data.temperature is not None:
            sizes = {name: packed.source.tokens for name, packed in self.corpora.items()}
            factors = tempered(sizes, data.temperature)
        shares: dict[str, Share] = {}
        lengths: dict[str, int] = {}
        for name, packed in self.corpora.items():
            corpus = data.corpora[name]
            budget = _budget(corpus, len(packed), data.sequence_length)
            shares[name] = Share(corpus.weight * factors[name], budget, corpus.role)
            lengths[name] = len(packed)
        self._roles = {name: share.role for name, share in shares.items()}
        blend = Blend(shares, data.fractions)
        self.total = blend.total
        self._order = SampleOrder(blend, lengths, seed)

    def __getitem__(self, index: int) -> Sample:
        name, number = self._order[index]
        return self.corpora[name][number]

    def epochs_after(self, samples: int) -> dict[str, float]:
        """How many epochs of each corpus the first `samples` samples make."""
        drawn = self._order.blend.drawn_before(samples)
        epochs: dict[str, float] = {}
        for name, corpus in self.corpora.items():
            epochs[name] = drawn[name] / len(corpus)
        return epochs

    def role_of(self, index: int) -> Role:
        """The role of the corpus that the sample at the global `index` comes from."""
        return self._roles[self._order.blend[index].corpus]


@dataclass(frozen=True)
class HeldoutSamples:
    """The held-out part of one corpus, cut into samples that do not overlap.

    The order is random but fixed, so that the first few are representative of all.

    Attributes:
        corpus: its name.
        tokens, bytes: of the whole part, without prompts. `bytes` are those of the text in UTF-8:
            bits per byte = nll_per_token · tokens / (bytes · ln 2).
        prompted: whether the documents have prompts.
    """

    corpus: str
    tokens: int
    bytes: int
    prompted: bool
    packed: PackedCorpus

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> Sample:
        # The key 0 in every run, whatever its seed: results of runs compare.
        return self.packed[Permutation(len(self), 0)[index]]

    def __iter__(self) -> Iterator[Sample]:
        for index in range(len(self)):
            yield self[index]


def load_heldout(data: Data, *, tokenizer_fingerprint: str | None) -> dict[str, HeldoutSamples]:
    """The held-out part of every corpus that has one.

    Raises:
        DataError: one is missing, unfinished, damaged, or was made with another tokenizer.
    """
    parts: dict[str, HeldoutSamples] = {}
    for name in data.corpora:
        if not has_heldout(data, name):
            continue
        folder = heldout_folder(data, name)
        corpus = TokenCorpus(folder, tokenizer_fingerprint=tokenizer_fingerprint)
        manifest = corpus.manifest
        parts[name] = HeldoutSamples(
            corpus=name,
            tokens=manifest.tokens - manifest.prompt_tokens,
            bytes=manifest.bytes - manifest.prompt_bytes,
            prompted=manifest.prompt_key is not None,
            packed=_packed(corpus, data),
        )
    return parts


def open_packed(data: Data, name: str, *, tokenizer_fingerprint: str | None) -> PackedCorpus:
    """The training part of the corpus `name`, cut into samples, in the order of its documents.

    Raises:
        DataError: it is missing, unfinished, damaged, or was made with another tokenizer.
    """
    folder = train_folder(data, name)
    corpus = TokenCorpus(folder, tokenizer_fingerprint=tokenizer_fingerprint)
    return _packed(corpus, data)


def rank_indices(
    first: int, *, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[list[int]]:
    """The global indices that a rank reads in the step that begins at sample `first`.

    One list per micro-batch.

    Together the ranks read [first, first + global_batch_size), however many they are.
    """
    # Rank r reads every dp_size-th sample from the r-th on, at any number of ranks.
    own = range(first + dp_rank, first + global_batch_size, dp_size)
    micro_batches: list[list[int]] = []
    for start in range(0, len(own), micro_batch_size):
        micro_batches.append(list(own[start : start + micro_batch_size]))
    return micro_batches


def _packed(corpus: TokenCorpus, data: Data) -> PackedCorpus:
    # Without a start token a base reads the end of another document before a document.
    return PackedCorpus(
        corpus,
        data.sequence_length,
        padding=corpus.manifest.tokenizer.document_end[-1],
        document_mask=data.document_mask,
        whole_documents=corpus.manifest.prompt_key is not None,
        begins_with_end=not corpus.manifest.tokenizer.document_start,
    )


def _budget(corpus: Corpus, samples: int, sequence_length: int) -> int | None:
    """After how many samples a corpus is exhausted; None: never."""
    if corpus.epochs is not None:
        # At least one sample: a small corpus with a fraction of an epoch is not silently left out.
        return max(1, math.floor(corpus.epochs * samples))
    if corpus.token_budget is not None:
        return math.ceil(corpus.token_budget / sequence_length)
    return None
