"""The samples of training and validation.

The sample at a global index is a pure function of (seed, blend, index). In a run of several stages
each has a blend and an index of its own, and goes on in each corpus where the one before it ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.config.data import Corpus, Data, Role
from pipeline.config.stage_plan import TrainingStage
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.blend import (
    Blend,
    Draw,
    PassingBlend,
    Permutation,
    Share,
    mix,
    tempered,
)
from pipeline.data.dataset.packing import IGNORED, PackedCorpus, Sample
from pipeline.data.tokenize.corpora import has_heldout, heldout_folder, train_folder
from pipeline.errors import DataError


class SampleOrder:
    """Maps a global index to a sample of a corpus, in constant time, without reading tokens.

    Every epoch of a corpus visits each of its samples once, in a random order of its own.

    Args:
        blend: which corpus is drawn when.
        lengths: the number of samples in an epoch of each corpus.
        seed: the seed of the random orders.
        drawn: how many samples of each corpus were drawn before; by default none.
    """

    def __init__(
        self,
        blend: Blend | PassingBlend,
        lengths: Mapping[str, int],
        seed: int,
        drawn: Mapping[str, int] | None = None,
    ) -> None:
        self.blend = blend
        self._lengths = dict(lengths)
        self._drawn = dict.fromkeys(lengths, 0) | dict(drawn or {})
        # A key for each corpus: two of the same length have different orders.
        self._keys = {name: mix(seed, *name.encode()) for name in lengths}

    def __getitem__(self, index: int) -> Draw:
        """The corpus, and the number of the sample in it, at the global `index`."""
        name, occurrence = self.blend[index]
        length = self._lengths[name]
        epoch, position = divmod(self._drawn[name] + occurrence, length)
        # A new permutation in each epoch; its round keys are made from the key, so that none is
        # stored.
        order = Permutation(length, self._keys[name], epoch)
        return Draw(name, order[position])


class Passage(NamedTuple):
    """The beginning of a stage whose proportions go along a line from those of another's data.

    Attributes:
        before: the data of the stage before it.
        samples: the length.
    """

    before: Data
    samples: int


class TrainingSamples:
    """`samples[i]` is the sample at the global index i, for 0 ≤ i < `total`.

    Args:
        data: the corpora, their proportions, and how they are packed.
        seed: the seed of the order.
        tokenizer_fingerprint: the run's; None accepts any.
        sampled_fingerprint: the base's, where the run extends its tokenizer: what the base wrote
            has its ids.
        earlier: the samples of the stage before, after whose `samples_before` samples these go on
            in each corpus; None if nothing was drawn before.
        samples_before: how many samples that stage had.
        passage: the passage from the proportions of the stage before, if there is one.

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
        earlier: TrainingSamples | None = None,
        samples_before: int = 0,
        passage: Passage | None = None,
    ) -> None:
        self.sequence_length = data.sequence_length
        settings = _drawn_corpora(data)
        if passage is not None:
            settings |= _drawn_corpora(passage.before)
        self.corpora: dict[str, PackedCorpus] = {}
        for name, corpus in settings.items():
            if earlier is not None and earlier.sequence_length == data.sequence_length:
                opened = earlier.corpora.get(name)
                if opened is not None:
                    self.corpora[name] = opened
                    continue
            fingerprint = tokenizer_fingerprint
            if corpus.sample is not None and sampled_fingerprint is not None:
                fingerprint = sampled_fingerprint
            self.corpora[name] = open_packed(data, name, tokenizer_fingerprint=fingerprint)

        # By name, of the corpora of all earlier stages: how many samples were drawn, of how many in
        # an epoch.
        self._drawn: dict[str, tuple[int, int]] = {}
        if earlier is not None:
            self._drawn = earlier.drawn_after(samples_before)
        drawn: dict[str, int] = {}
        budgets: dict[str, int | None] = {}
        for name, packed in self.corpora.items():
            drawn[name] = self._drawn_in_this_cut(name)
            budget = _budget(settings[name], len(packed), data.sequence_length)
            budgets[name] = None if budget is None else max(0, budget - drawn[name])
        self._roles: dict[str, Role] = {name: corpus.role for name, corpus in settings.items()}
        blend: Blend | PassingBlend
        if passage is None:
            blend = self._blend(data, budgets)
        else:
            blend = self._passing_blend(data, budgets, passage)
        self.total = blend.total
        lengths = {name: len(packed) for name, packed in self.corpora.items()}
        self._order = SampleOrder(blend, lengths, seed, drawn)

    def _drawn_in_this_cut(self, name: str) -> int:
        """How many samples of a corpus, as it is cut here, earlier stages have drawn."""
        if name not in self._drawn:
            return 0
        drawn, length = self._drawn[name]
        # Cut into samples of another length, the corpus goes on at the same share of its epoch.
        return -(-drawn * len(self.corpora[name]) // length)

    def _blend(self, data: Data, budgets: Mapping[str, int | None]) -> Blend:
        """The blend of the proportions of `data`."""
        read = _drawn_corpora(data)
        # The temperature changes proportions within a role alone: the fractions divide the roles.
        factors = dict.fromkeys(read, 1.0)
        if data.temperature is not None:
            sizes = {name: self.corpora[name].source.tokens for name in read}
            factors = tempered(sizes, data.temperature)
        shares: dict[str, Share] = {}
        for name, role in self._roles.items():
            if name in read:
                shares[name] = Share(read[name].weight * factors[name], budgets[name], role)
            else:
                # Of the other blend of a passage: nothing is drawn of it here.
                shares[name] = Share(1.0, 0, role)
        return Blend(shares, data.fractions)

    def _passing_blend(
        self, data: Data, budgets: Mapping[str, int | None], passage: Passage
    ) -> PassingBlend:
        """The blend of a stage that begins with a passage."""
        before = self._blend(passage.before, budgets)
        # What the passage draws by the proportions before it counts in the budgets.
        of_before = passage.samples - passage.samples // 2
        if before.total is not None:
            of_before = min(of_before, before.total)
        left: dict[str, int | None] = {}
        for name, count in before.drawn_before(of_before).items():
            budget = budgets[name]
            left[name] = None if budget is None else max(0, budget - count)
        return PassingBlend(before, self._blend(data, left), passage.samples)

    def drawn_after(self, samples: int) -> dict[str, tuple[int, int]]:
        """After the first `samples` samples: what was drawn of each corpus, in all stages so far.

        By name, the number of samples drawn and the number of samples in an epoch.
        """
        drawn = dict(self._drawn)
        for name, count in self._order.blend.drawn_before(samples).items():
            drawn[name] = (self._drawn_in_this_cut(name) + count, len(self.corpora[name]))
        return drawn

    def __getitem__(self, index: int) -> Sample:
        name, number = self._order[index]
        return self.corpora[name][number]

    def epochs_after(self, samples: int) -> dict[str, float]:
        """How many epochs of each corpus the first `samples` samples, and earlier stages, make."""
        epochs: dict[str, float] = {}
        for name, (drawn, length) in self.drawn_after(samples).items():
            epochs[name] = drawn / length
        return epochs

    def role_of(self, index: int) -> Role:
        """The role of the corpus that the sample at the global `index` comes from."""
        return self._roles[self._order.blend[index].corpus]


class StageSamples(NamedTuple):
    """The samples of a stage of a run: those of `samples` from the global index `first` on."""

    samples: TrainingSamples
    first: int


def samples_of_stages(
    stages: Sequence[TrainingStage],
    *,
    seed: int,
    tokenizer_fingerprint: str | None,
    sampled_fingerprint: str | None = None,
) -> tuple[StageSamples, ...]:
    """The samples of each stage of a run.

    Stages with equal data read one order, as one stage would. With other data a stage begins a new
    order, which goes on in each corpus where the stage before it ended.

    Raises:
        DataError: as `TrainingSamples`; or the corpora end before the stage does.
    """
    found: list[StageSamples] = []
    stop = 0  # the index past the last sample of the stage before, in its order
    for stage in stages:
        data = stage.config.data
        batch_size = stage.config.schedule.global_batch_size
        passage = None
        if stage.data_before is not None:
            passage = Passage(stage.data_before, stage.passage_steps * batch_size)
        first = 0
        if found and passage is None and data == stages[stage.number - 1].config.data:
            first = stop
            samples = found[-1].samples
        else:
            samples = TrainingSamples(
                data,
                seed=seed,
                tokenizer_fingerprint=tokenizer_fingerprint,
                sampled_fingerprint=sampled_fingerprint,
                earlier=found[-1].samples if found else None,
                samples_before=stop,
                passage=passage,
            )
        needed = stage.steps * batch_size
        stop = first + needed
        # Before the first step, not at the last: a job of days would end in an error.
        if samples.total is not None and samples.total < stop:
            steps = "schedule.steps"
            if stage.name:
                steps = f"stages.{stage.name}.steps"
            left = max(0, samples.total - first)
            raise DataError(
                f"{steps}: {stage.steps} steps need {needed} sequences, but the corpora's epochs "
                f"and token budgets end after {left}; use at most {left // batch_size} steps"
            )
        found.append(StageSamples(samples, first))
    return tuple(found)


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


def check_predicts(
    stages: Iterable[StageSamples], heldout: Mapping[str, HeldoutSamples], max_sequences: int
) -> None:
    """Checks that each corpus trains something, and that each held-out part has a score.

    Sequences predict nothing where prompts fill them, or documents of one token.

    Args:
        stages: what trains.
        heldout: the held-out parts.
        max_sequences: how many sequences of each part are scored, its first ones.

    Raises:
        DataError: none of the sequences that are read of a corpus predicts a token.
    """
    for stage in stages:
        for name, packed in stage.samples.corpora.items():
            if not _any_predicts(packed, len(packed)):
                raise DataError(
                    f"{packed.source.folder}: no sequence of data.corpora.{name} predicts a token: "
                    f"expected texts to learn, found {_what_fills(packed)}; name other texts, or "
                    "remove the corpus"
                )
    for name, part in heldout.items():
        count = min(max_sequences, len(part))
        if not _any_predicts(part, count):
            raise DataError(
                f"{part.packed.source.folder}: the held-out part of data.corpora.{name} predicts "
                f"no token in the sequences that are scored ({count} of {len(part)}): expected "
                f"texts to score, found {_what_fills(part.packed)}; raise data.sequence_length or "
                "validation.max_sequences, or hold other texts out"
            )


def _any_predicts(samples: PackedCorpus | HeldoutSamples, count: int) -> bool:
    """Whether one of the first `count` samples predicts a token; usually the first one does."""
    return any((samples[index].targets != IGNORED).any() for index in range(count))


def _what_fills(packed: PackedCorpus) -> str:
    """What sequences hold that predict nothing."""
    if packed.source.manifest.prompt_key is None:
        return "documents of one token"
    return f"prompts that fill all {packed.sequence_length} tokens (data.sequence_length)"


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


def _drawn_corpora(data: Data) -> dict[str, Corpus]:
    """The corpora from which training samples are drawn; the others need not exist."""
    drawn: dict[str, Corpus] = {}
    for name, corpus in data.corpora.items():
        if corpus.role == "new" or data.fractions[corpus.role] > 0:
            drawn[name] = corpus
    return drawn


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
