"""The micro-batches of a rank; the samples of a step depend on its number alone.

Every rank of a tensor-parallel group reads the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.data.samples import Sample, TrainingSamples, rank_indices
from pipeline.model.attention import Documents
from pipeline.parallel.topology import Layout


class MicroBatch(NamedTuple):
    """The decoder's inputs, tensors of [B, S]; `documents` is None where attention may cross them.

    The first `kl_rows` sequences train by KL(base || model). `reference_rows` is the largest such number among the
    ranks: the base runs on as many, so that all ranks run the same layers.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Documents | None
    kl_rows: int = 0
    reference_rows: int = 0


class TrainingBatches:
    """The micro-batches of a rank, on its device."""

    def __init__(
        self, samples: TrainingSamples, config: RunConfig, layout: Layout, rank: int, device: torch.device
    ) -> None:
        self.samples = samples
        self.schedule = config.schedule
        self.document_mask = config.data.document_mask
        self.kl_roles = config.data.kl_roles
        self.rehearses = config.data.kl_fraction > 0
        self.dp_rank, self.dp_size = layout.dp_rank(rank), layout.dp_size
        self.device = device

    def of_step(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches that this rank accumulates for the optimizer step after `step` steps."""
        if not self.rehearses:
            for indices in self._indices(step):
                yield self._collated(indices)
            return
        own, fullest = self._dealt(step)
        for indices, most in zip(own, fullest, strict=True):
            yield self._collated(indices)._replace(kl_rows=self._kl_rows(indices), reference_rows=self._kl_rows(most))

    def _indices(self, step: int) -> list[list[int]]:
        return rank_indices(
            step * self.schedule.global_batch_size,
            global_batch_size=self.schedule.global_batch_size,
            micro_batch_size=self.schedule.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        )

    def _dealt(self, step: int) -> tuple[list[list[int]], list[list[int]]]:
        """This rank's indices and rank 0's, a list per micro-batch; those that train by KL are dealt out first.

        So they are spread evenly, and no rank has more of them than rank 0. In their own order, with many ranks almost
        every micro-batch would have one on some rank, and all ranks would run the base in almost every one.
        """
        batch_size = self.schedule.global_batch_size
        indices = range(step * batch_size, (step + 1) * batch_size)
        ordered = sorted(indices, key=lambda index: not self._is_kl(index))
        stride = batch_size // self.schedule.micro_batch_size  # micro-batches over all ranks
        own, fullest = (
            [ordered[first::stride] for first in range(rank, stride, self.dp_size)] for rank in (self.dp_rank, 0)
        )
        return own, fullest

    def _collated(self, indices: Sequence[int]) -> MicroBatch:
        return collate([self.samples[index] for index in indices], self.document_mask, self.device)

    def _is_kl(self, index: int) -> bool:
        return self.samples.role_of(index) in self.kl_roles

    def _kl_rows(self, indices: Sequence[int]) -> int:
        return sum(map(self._is_kl, indices))


def collate(samples: Sequence[Sample], document_mask: bool, device: torch.device) -> MicroBatch:
    """Joins samples of S tokens each into a micro-batch of [B, S] on `device`.

    Without `document_mask` only padding could be masked; it comes last, where causal attention never reads it.
    """

    def moved(values: Tensor) -> Tensor:
        if device.type != "cuda":
            return values.to(device)
        # From pinned memory: otherwise the host would wait until the GPU has reached the copy.
        return values.pin_memory().to(device, non_blocking=True)

    def stacked(field: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(sample, field) for sample in samples]))

    return MicroBatch(
        tokens=moved(stacked("tokens")),
        targets=moved(stacked("targets")),
        positions=moved(stacked("positions")),
        documents=Documents.of(stacked("document_ids")).moved(moved) if document_mask else None,
    )
