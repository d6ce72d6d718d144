"""Process groups in which only rank 0 exists: a micro-batch of one rank runs in one process.

The messages of the group are counted, and not sent.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.topology import ALL_EXPERTS, ExpertParallel, TensorParallel


class RecordingGroup(dist.ProcessGroup):
    """A process group without other ranks, which adds up the lengths of its messages.

    torch.distributed calls these methods for its collectives. They leave the outputs as they are,
    which have no data on the meta device.

    Args:
        size: the number of ranks.
        payload_bytes: where lengths are added, by (size, collective).
    """

    def __init__(self, size: int, payload_bytes: Counter[tuple[int, str]]) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # torch's stub has other parameters
        self._payload_bytes = payload_bytes

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], options: Any = None
    ) -> None:
        self._record("all-reduce", *tensors)

    def all_gather_single(  # type: ignore[override]
        self, output: Tensor, own: Tensor, options: Any = None
    ) -> None:
        # Of input and output the longer one counts: the formulas of `sizing.traffic` assume it.
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
        for tensor in tensors:
            self._payload_bytes[self.size(), collective] += tensor.nbytes


def imagined_ranks(
    tp_size: int,
    payload_bytes: Counter[tuple[int, str]],
    *,
    sequence_parallel: bool = False,
    expert_parallel: ExpertParallel = ALL_EXPERTS,
) -> TensorParallel:
    """Rank 0 of `tp_size` tensor-parallel ranks, whose messages are counted in `payload_bytes`."""
    if tp_size == 1:
        return TensorParallel(expert_parallel=expert_parallel)
    # Where there are fewer key/value heads than ranks, the ranks with the same head form a replica
    # group. Its size divides tp_size; which sizes a model needs is not known here.
    groups = []
    for size in range(2, tp_size):
        if tp_size % size == 0:
            groups.append((size, RecordingGroup(size, payload_bytes)))
    whole = RecordingGroup(tp_size, payload_bytes)
    return TensorParallel(0, tp_size, whole, tuple(groups), sequence_parallel, expert_parallel)


def imagined_expert_ranks(
    expert_size: int, payload_bytes: Counter[tuple[int, str]], *, padded: bool = False
) -> ExpertParallel:
    """Rank 0 of `expert_size` ranks that share experts, as `imagined_ranks`.

    padded: see parallel.padded_experts.
    """
    if expert_size == 1:
        return ALL_EXPERTS
    return ExpertParallel(0, expert_size, RecordingGroup(expert_size, payload_bytes), padded)
