"""Held-out scores of perplexity, bits per byte and answers, the same to the last bit however the ranks are arranged."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.data.packing import IGNORED, Sample
from pipeline.data.samples import HeldoutSamples
from pipeline.model.output import Losses
from pipeline.parallel.topology import Layout
from pipeline.training.answers import AnswerScore, answer_score, answer_sums
from pipeline.training.batches import MicroBatch, collate
from pipeline.training.engine import Engine
from pipeline.training.unison import summed

_LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True)
class HeldoutScore:
    """How well the model predicts one corpus."""

    nll_per_token: float
    bits_per_byte: float
    answers: AnswerScore | None = None

    @property
    def perplexity(self) -> float:
        """exp(nll per token)."""
        return math.exp(self.nll_per_token) if self.nll_per_token < _LARGEST_EXPONENT else math.inf

    def figures(self) -> dict[str, float]:
        """By their lasting names."""
        known = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return known | asdict(self.answers) if self.answers else known


class Validation:
    """Scores the model on the first `max_sequences` samples of each held-out part."""

    def __init__(
        self,
        heldout: Mapping[str, HeldoutSamples],
        config: RunConfig,
        layout: Layout,
        rank: int,
        device: torch.device,
    ) -> None:
        self.heldout = heldout
        self.max_sequences = config.validation.max_sequences
        self.micro_batch_size = config.schedule.micro_batch_size
        self.document_mask = config.data.document_mask
        self.tp_rank, self.dp_rank = layout.tp_rank(rank), layout.dp_rank(rank)
        self.dp_size = layout.dp_size
        self.device = device

    def run(self, engine: Engine) -> dict[str, HeldoutScore]:
        """The score of every corpus that has a held-out part; every rank must call it."""
        with engine.evaluating():
            return {name: self._score(engine, samples) for name, samples in self.heldout.items()}

    def _score(self, engine: Engine, samples: HeldoutSamples) -> HeldoutScore:
        count = min(self.max_sequences, len(samples))
        # One row a sequence, each filled by one rank: the sum below runs in the same order in every layout.
        sums = torch.zeros(count, 6, dtype=torch.float64, device=self.device)
        at_once = self.micro_batch_size * self.dp_size
        for first in range(0, count, at_once):
            start = first + self.dp_rank * self.micro_batch_size
            own = range(min(start, count), min(start + self.micro_batch_size, count))
            # Where this rank has too few, the first one stands in, for all must run the same forwards.
            read = [samples[index] for index in (*own, *[0] * (self.micro_batch_size - len(own)))]
            batch = collate(read, self.document_mask, self.device)
            losses = engine.loss(batch)
            if self.tp_rank == 0 and own:
                rows = _sums(losses, batch, read)
                sums[own.start : own.stop] = rows[: len(own)]
        nll_sum, predicted_count, *of_answers = summed(sums).sum(dim=0).tolist()
        nll_per_token = nll_sum / predicted_count if predicted_count else math.nan
        bits_per_byte = nll_per_token * samples.tokens / (samples.bytes * math.log(2))
        return HeldoutScore(nll_per_token, bits_per_byte, answer_score(of_answers))


def _sums(losses: Losses, batch: MicroBatch, read: Sequence[Sample]) -> Tensor:
    """Of each sequence: its nll, how many tokens are predicted, and what `answer_sums` counts. [B, 6]"""
    predicted = (batch.targets != IGNORED).sum(dim=1)
    answer_starts = torch.from_numpy(np.stack([sample.answer_starts for sample in read])).to(batch.targets.device)
    answers = answer_sums(losses, batch.targets, answer_starts)
    return torch.cat([torch.stack([losses.nll.double().sum(dim=1), predicted.double()], dim=1), answers], dim=1)
