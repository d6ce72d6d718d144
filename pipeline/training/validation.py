"""Held-out perplexity and bits per byte, the same to the last bit however the ranks are arranged."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.config import RunConfig
from pipeline.data.packing import IGNORED
from pipeline.data.samples import HeldoutSamples
from pipeline.parallel.topology import Layout
from pipeline.training.batches import MicroBatch, collate
from pipeline.training.engine import Engine

_LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True)
class HeldoutScore:
    """How well the model predicts one corpus."""

    nll_per_token: float
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        """exp(nll per token)."""
        return math.exp(self.nll_per_token) if self.nll_per_token < _LARGEST_EXPONENT else math.inf


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
        sums = torch.zeros(count, 2, dtype=torch.float64, device=self.device)
        at_once = self.micro_batch_size * self.dp_size
        for first in range(0, count, at_once):
            start = first + self.dp_rank * self.micro_batch_size
            own = range(min(start, count), min(start + self.micro_batch_size, count))
            batch = self._batch(samples, own)
            _, nll, _ = engine.loss(batch)
            if self.tp_rank == 0 and own:
                predicted = (batch.targets != IGNORED).sum(dim=1)
                rows = torch.stack([nll.double().sum(dim=1), predicted.double()], dim=1)
                sums[own.start : own.stop] = rows[: len(own)]
        dist.all_reduce(sums)
        nll_sum, predicted_count = sums.sum(dim=0).tolist()
        nll_per_token = nll_sum / predicted_count
        return HeldoutScore(nll_per_token, nll_per_token * samples.tokens / (samples.bytes * math.log(2)))

    def _batch(self, samples: HeldoutSamples, own: range) -> MicroBatch:
        """This rank's samples; where it has too few, the first one stands in, for all must run the same forwards."""
        padded = [*own, *[0] * (self.micro_batch_size - len(own))]
        return collate([samples[index] for index in padded], self.document_mask, self.device)
