"""What a rank reads in a step: pure arithmetic on sample indices, then tensors on its device.

Every rank of a tensor-parallel group reads the same samples. Which ones a step is made of depends on its number only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.data.samples import Sample, TrainingSamples, rank_indices
from pipeline.parallel.topology import Layout


class MicroBatch(NamedTuple):
    """The decoder's inputs, each [B, S]; `document_ids` is None where attention may cross documents."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor | None


class TrainingBatches:
    """The micro-batches of one rank."""

    def __init__(
        self, samples: TrainingSamples, config: RunConfig, layout: Layout, rank: int, device: torch.device
    ) -> None:
        self.samples = samples
        self.schedule = config.schedule
        self.document_mask = config.data.document_mask
        self.dp_rank, self.dp_size = layout.dp_rank(rank), layout.dp_size
        self.device = device

    def of_step(self, step: int) -> Iterator[MicroBatch]:
        """Those that this rank adds up for the optimizer step that follows `step` steps."""
        batch_size = self.schedule.global_batch_size
        for indices in rank_indices(
            step * batch_size,
            global_batch_size=batch_size,
            micro_batch_size=self.schedule.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        ):
            yield collate([self.samples[index] for index in indices], self.document_mask, self.device)


def collate(samples: Sequence[Sample], document_mask: bool, device: torch.device) -> MicroBatch:
    """Samples side by side.

    Without `document_mask` only padding would be set apart, and that comes after all it could disturb.
    """
    return MicroBatch(
        tokens=_stacked((sample.tokens for sample in samples), device),
        targets=_stacked((sample.targets for sample in samples), device),
        positions=_stacked((sample.positions for sample in samples), device),
        document_ids=_stacked((sample.document_ids for sample in samples), device) if document_mask else None,
    )


def _stacked(rows: Iterable[npt.NDArray[np.int64]], device: torch.device) -> Tensor:
    stacked = torch.from_numpy(np.stack(list(rows)))
    if device.type != "cuda":
        return stacked.to(device)
    # From pinned memory: a copy of other memory makes the host wait until the GPU has come to it.
    return stacked.pin_memory().to(device, non_blocking=True)
