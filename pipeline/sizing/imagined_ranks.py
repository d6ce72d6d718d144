"""Process groups of which only rank 0 exists: their messages are counted, not sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import ALL_EXPERTS, ExpertParallel, TensorParallel


class RecordingGroup(dist.ProcessGroup):
    """A process group without other ranks: its messages are added up, not sent."""

    def __init__(self, size: int, payload_bytes: Counter[tuple[int, str]]) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # the stub has another one
        self._payload_bytes = payload_bytes

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], options: Any = None
    ) -> None:
        self._record("all-reduce", *tensors)

    def all_gather_single(  # type: ignore[override]
        self, output: Tensor, own: Tensor, options: Any = None
    ) -> None:
        # The longer side of the message: the formulas of `sizing.traffic` take that one.
        self._record("all-gather", output)

    def reduce_scatter_single(  # type: ignore[override]
        self, own: Tensor, given: Tensor, options: Any = None
    ) -> None:
        self._record("reduce-scatter", given)

    def all_to_all_single(  # type: ignore[override]
        self,
        received: Tensor,
        given: Tensor,
        received_sizes: list[int],
        given_sizes: list[int],
        options: Any = None,
    ) -> None:
        self._record("all-to-all", given)

    def _record(self, collective: str, *tensors: Tensor) -> None:
        self._payload_bytes[self.size(), collective] += sum(tensor.nbytes for tensor in tensors)


def imagined_ranks(
    tp_size: int,
    payload_bytes: Counter[tuple[int, str]],
    *,
    sequence_parallel: bool = False,
    expert_parallel: ExpertParallel = ALL_EXPERTS,
) -> TensorParallel:
    """Rank 0 of `tp_size` tensor-parallel ranks without the others.

    Its messages are counted in `payload_bytes`, and not sent.
    """
    if tp_size == 1:
        return TensorParallel(expert_parallel=expert_parallel)
    # Ranks with the same key/value head form a replica group, of a size that divides tp_size.
    groups = []
    for size in range(2, tp_size):
        if tp_size % size == 0:
            groups.append((size, RecordingGroup(size, payload_bytes)))
    whole = RecordingGroup(tp_size, payload_bytes)
    return TensorParallel(0, tp_size, whole, tuple(groups), sequence_parallel, expert_parallel)


def imagined_expert_ranks(
    expert_size: int, payload_bytes: Counter[tuple[int, str]], *, padded: bool = False
) -> ExpertParallel:
    """Rank 0 of `expert_size` ranks that share experts, without the others; as `imagined_ranks`."""
    if expert_size == 1:
        return ALL_EXPERTS
    return ExpertParallel(0, expert_size, RecordingGroup(expert_size, payload_bytes), padded)
