"""The micro-batches of a rank; the samples of a step depend on its number alone.

Every rank of a tensor-parallel group reads the same samples. A thread prepares the next micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.data.dataset.packing import Sample
from pipeline.data.dataset.samples import TrainingSamples, rank_indices
from pipeline.deepspeed_config import accumulation_steps
from pipeline.model.attention import Documents
from pipeline.parallel.topology import Layout

READ_AHEAD = 2
"""How many micro-batches are prepared while one is computed."""
Plan = tuple[list[list[int]], list[list[int]]]
"""The indices of a step's samples: a list per micro-batch, of this rank and of the one with the most to train by KL."""


class MicroBatch(NamedTuple):
    """The decoder's inputs, tensors of [B, S]; `documents` is None where attention may cross them."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Documents | None
    kl_sequences: int = 0
    """so many sequences, the first, train by KL(base || model)"""
    reference_sequences: int = 0
    """the largest such number among the ranks: the base runs on as many, so that all ranks run the same layers"""

    def pinned_for(self, device: torch.device) -> MicroBatch:
        """The same in memory that a GPU can copy by itself; a copy from elsewhere would make the host wait."""
        return self if device.type == "cpu" else self._mapped(Tensor.pin_memory)

    def on(self, device: torch.device) -> MicroBatch:
        """The same on `device`, once that has done what was asked of it before."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        tokens, targets, positions = map(change, (self.tokens, self.targets, self.positions))
        documents = None if self.documents is None else self.documents.moved(change)
        return self._replace(
            tokens=tokens, targets=targets, positions=positions, documents=documents
        )


class TrainingBatches:
    """The micro-batches of a rank, on its device.

    A thread of its own reads and packs the next ones, and pins them for a GPU: nothing else may read `samples`. What it
    has read ahead is no state of the run, which resumes from the number of a step. `close` ends it.
    """

    def __init__(
        self,
        samples: TrainingSamples,
        config: RunConfig,
        layout: Layout,
        rank: int,
        device: torch.device,
    ) -> None:
        self.samples = samples
        self.schedule = config.schedule
        self.document_mask = config.data.document_mask
        self.kl_roles = config.data.kl_roles
        self.uses_kl = config.data.kl_fraction > 0
        self.dp_rank, self.dp_size = layout.dp_rank(rank), layout.dp_size
        self.device = device
        self._per_step = accumulation_steps(config.schedule, self.dp_size)
        self._end = self.schedule.steps * self._per_step
        self._planned: tuple[int, Plan] | None = None
        self._ahead: dict[int, Future[MicroBatch]] = {}
        # On a machine of several GPUs the thread would otherwise use the first one.
        initializer = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._reader = ThreadPoolExecutor(1, "batches", initializer)

    def of_step(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of the step after `step` steps; raises DataError where a sample of one cannot be read."""
        for number in range(step * self._per_step, (step + 1) * self._per_step):
            if number not in self._ahead:
                self._expect(range(number, number + 1))
            yield self._ahead.pop(number).result().on(self.device)
            # Not before: threads of Python take turns, and only now does the GPU have its work.
            self._expect(range(number + 1, min(number + 1 + READ_AHEAD, self._end)))

    def close(self) -> None:
        """Ends the thread, after the micro-batch that it is reading."""
        self._reader.shutdown(cancel_futures=True)

    def _expect(self, numbers: range) -> None:
        """Lets the thread read these micro-batches, counted from the beginning of the run.

        Others are forgotten, left over where the run goes on elsewhere: a step computed again or skipped.
        """
        for left in self._ahead.keys() - set(numbers):
            self._ahead.pop(left).cancel()
        for number in numbers:
            if number not in self._ahead:
                self._ahead[number] = self._reader.submit(self._read, number)

    def _read(self, number: int) -> MicroBatch:
        step, place = divmod(number, self._per_step)
        if self._planned is None or self._planned[0] != step:
            self._planned = step, self._plan(step)
        own, fullest = (part[place] for part in self._planned[1])
        batch = collate([self.samples[index] for index in own], self.document_mask)
        if self.uses_kl:
            batch = batch._replace(
                kl_sequences=self._kl_sequences(own),
                reference_sequences=self._kl_sequences(fullest),
            )
        return batch.pinned_for(self.device)

    def _plan(self, step: int) -> Plan:
        """Which samples a step reads; those that train by KL are dealt out first, evenly: no rank has more than rank 0.

        In their own order, with many ranks almost every micro-batch would have one on some rank, and all ranks would
        run the base in almost every one.
        """
        batch_size, micro_batch_size = (
            self.schedule.global_batch_size,
            self.schedule.micro_batch_size,
        )
        first = step * batch_size
        if not self.uses_kl:
            sizes = {
                "global_batch_size": batch_size,
                "micro_batch_size": micro_batch_size,
                "dp_size": self.dp_size,
            }
            own = rank_indices(first, dp_rank=self.dp_rank, **sizes)
            return own, own
        ordered = sorted(range(first, first + batch_size), key=lambda index: not self._is_kl(index))
        stride = batch_size // micro_batch_size  # micro-batches over all ranks
        own, fullest = (
            [ordered[start::stride] for start in range(rank, stride, self.dp_size)]
            for rank in (self.dp_rank, 0)
        )
        return own, fullest

    def _is_kl(self, index: int) -> bool:
        return self.samples.role_of(index) in self.kl_roles

    def _kl_sequences(self, indices: Sequence[int]) -> int:
        return sum(map(self._is_kl, indices))


def collate(samples: Sequence[Sample], document_mask: bool) -> MicroBatch:
    """Joins samples of S tokens each into a micro-batch of [B, S], on the host.

    Without `document_mask` only padding could be masked; it comes last, where causal attention never reads it.
    """
    fields = ("tokens", "targets", "positions", "document_ids")
    tokens, targets, positions, ids = (
        torch.from_numpy(np.stack([getattr(sample, field) for sample in samples]))
        for field in fields
    )
    return MicroBatch(tokens, targets, positions, Documents.of(ids) if document_mask else None)
