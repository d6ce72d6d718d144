"""The micro-batches of a rank; the samples of a step depend on its number alone.

Every rank of a tensor-parallel group reads the same samples. A thread prepares the next
micro-batches.
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


class MicroBatch(NamedTuple):
    """The decoder's inputs.

    Attributes:
        tokens, targets, positions: [B, S].
        documents: None where attention may cross documents.
        kl_sequences: how many sequences, the first ones, train by KL(base || model).
        reference_sequences: the largest `kl_sequences` among the ranks. The base runs on so many
            sequences on every rank, so that all ranks run the same layers and collectives.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Documents | None
    kl_sequences: int = 0
    reference_sequences: int = 0

    def pinned_for(self, device: torch.device) -> MicroBatch:
        """The same in pinned memory, which a GPU copies without making the host wait."""
        if device.type == "cpu":
            return self
        return self._mapped(Tensor.pin_memory)

    def on(self, device: torch.device) -> MicroBatch:
        """The same on `device`; the copy is queued behind the device's earlier work."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        documents = self.documents
        if documents is not None:
            documents = documents.moved(change)
        return self._replace(
            tokens=change(self.tokens),
            targets=change(self.targets),
            positions=change(self.positions),
            documents=documents,
        )


class StepPlan(NamedTuple):
    """The samples that this rank reads in a step. Each list has an entry per micro-batch.

    Attributes:
        samples: the global indices of the samples.
        kl_sequences, reference_sequences: see `MicroBatch`.
    """

    samples: list[list[int]]
    kl_sequences: list[int]
    reference_sequences: list[int]


class TrainingBatches:
    """The micro-batches of a rank, on its device.

    A thread reads and packs the next ones, and pins them for a GPU; nothing else may read
    `samples`. What it has read ahead is no state of the run, because a run resumes from the number
    of a step. `close` ends the thread.
    """

    def __init__(
        self,
        samples: TrainingSamples,
        config: RunConfig,
        layout: Layout,
        rank: int,
        device: torch.device,
        first_sample: int = 0,
    ) -> None:
        """`first_sample` is the global index of the first sample of step 0."""
        self.samples = samples
        self.first_sample = first_sample
        self.schedule = config.schedule
        self.document_mask = config.data.document_mask
        self.kl_roles = config.data.kl_roles
        # With a passage, both stages train by KL or none does.
        self.uses_kl = config.data.kl_fraction > 0
        self.dp_rank = layout.dp_rank(rank)
        self.dp_size = layout.dp_size
        self.device = device
        self._per_step = accumulation_steps(config.schedule, self.dp_size)
        self._end = self.schedule.steps * self._per_step
        self._plan: StepPlan | None = None
        self._planned_step: int | None = None
        self._ahead: dict[int, Future[MicroBatch]] = {}
        initializer = None
        if device.type == "cuda":
            # On a machine of several GPUs the thread would otherwise use the first one.
            initializer = partial(torch.cuda.set_device, device)
        self._reader = ThreadPoolExecutor(1, "batches", initializer)

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of the step after `step` steps.

        Raises:
            DataError: a sample of one cannot be read.
        """
        for number in range(step * self._per_step, (step + 1) * self._per_step):
            if number not in self._ahead:
                self._read_ahead(range(number, number + 1))
            batch = self._ahead.pop(number).result()
            yield batch.on(self.device)
            # Not before the yield: threads of Python take turns, and only now has the GPU its work.
            self._read_ahead(range(number + 1, min(number + 1 + READ_AHEAD, self._end)))

    def close(self) -> None:
        """Ends the thread, after the micro-batch that it is reading."""
        self._reader.shutdown(cancel_futures=True)

    def _read_ahead(self, numbers: range) -> None:
        """Lets the thread read these micro-batches, counted from the beginning of the run.

        Others are forgotten: they are left over where the run went on elsewhere, as after a step
        that was computed again or skipped.
        """
        for left in self._ahead.keys() - set(numbers):
            self._ahead.pop(left).cancel()
        for number in numbers:
            if number not in self._ahead:
                self._ahead[number] = self._reader.submit(self._read, number)

    def _read(self, number: int) -> MicroBatch:
        step, place = divmod(number, self._per_step)
        if self._plan is None or self._planned_step != step:
            self._plan = self._plan_of(step)
            self._planned_step = step
        samples = [self.samples[index] for index in self._plan.samples[place]]
        batch = collate(samples, self.document_mask)
        batch = batch._replace(
            kl_sequences=self._plan.kl_sequences[place],
            reference_sequences=self._plan.reference_sequences[place],
        )
        return batch.pinned_for(self.device)

    def _plan_of(self, step: int) -> StepPlan:
        """Which samples a step reads, in their order unless some of them train by KL."""
        first = self.first_sample + step * self.schedule.global_batch_size
        if self.uses_kl:
            return self._plan_with_kl(first)
        samples = rank_indices(
            first,
            global_batch_size=self.schedule.global_batch_size,
            micro_batch_size=self.schedule.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        )
        no_kl = [0] * len(samples)
        return StepPlan(samples, no_kl, no_kl)

    def _plan_with_kl(self, first: int) -> StepPlan:
        """Deals out the samples that train by KL before the others, evenly over all micro-batches.

        If they stayed in their own order, with many ranks almost every micro-batch would have one
        on some rank, and all ranks would run the base in almost every one. Dealt like this, no rank
        has more of them than rank 0.
        """
        indices = range(first, first + self.schedule.global_batch_size)
        # `sorted` is stable: within each of the two groups the order stays.
        ordered = sorted(indices, key=lambda index: not self._is_kl(index))
        micro_batches = len(indices) // self.schedule.micro_batch_size  # of all ranks together
        plan = StepPlan([], [], [])
        for start in range(0, micro_batches, self.dp_size):
            own = ordered[start + self.dp_rank :: micro_batches]
            of_rank0 = ordered[start::micro_batches]
            plan.samples.append(own)
            plan.kl_sequences.append(sum(map(self._is_kl, own)))
            plan.reference_sequences.append(sum(map(self._is_kl, of_rank0)))
        return plan

    def _is_kl(self, index: int) -> bool:
        """Whether a sample trains by KL(base || model)."""
        return self.samples.role_of(index) in self.kl_roles


def collate(samples: Sequence[Sample], document_mask: bool) -> MicroBatch:
    """Joins samples of S tokens each into a micro-batch of [B, S], on the host.

    Without `document_mask`, only padding would have to be masked. It comes last in a sample, where
    causal attention never reads it.
    """

    def stacked(field: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(sample, field) for sample in samples]))

    documents = None
    if document_mask:
        documents = Documents.of(stacked("document_ids"))
    return MicroBatch(stacked("tokens"), stacked("targets"), stacked("positions"), documents)
