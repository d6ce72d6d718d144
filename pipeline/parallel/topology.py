"""The layout of ranks and its process groups.

The ranks of a tensor-parallel group are consecutive, so that they share a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pipeline.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """A world of `world_size` ranks in groups of `tp_size` tensor-parallel neighbours.

    Of the data-parallel ranks, `expert_size` neighbours share the experts of a mixture, as in
    Megatron-LM: they see different data, and each holds some of the experts whole.
    """

    world_size: int
    tp_size: int = 1
    expert_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.tp_size:
            raise LayoutError(
                f"parallel.tp_size: expected a divisor of the number of ranks, {self.world_size}, "
                f"found {self.tp_size}"
            )
        if self.dp_size % self.expert_size:
            raise LayoutError(
                "parallel.expert_size: expected a divisor of the number of data-parallel ranks, "
                f"{self.dp_size}, found {self.expert_size}"
            )

    @property
    def dp_size(self) -> int:
        """How many replicas of the model see different data."""
        return self.world_size // self.tp_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def dp_rank(self, rank: int) -> int:
        """Which replica of the model `rank` belongs to."""
        return rank // self.tp_size

    def expert_rank(self, rank: int) -> int:
        """Which part of the experts `rank` holds."""
        return self.dp_rank(rank) % self.expert_size

    def tp_groups(self) -> list[list[int]]:
        """The ranks that hold the shards of one replica."""
        return self.replica_groups(self.tp_size)

    def dp_groups(self) -> list[list[int]]:
        """The ranks that hold the same shard."""
        # Tensor-parallel ranks talk several times a layer, data-parallel ones once a step or less:
        # so the latter are the ones that are far apart.
        return [list(range(first, self.world_size, self.tp_size)) for first in range(self.tp_size)]

    def expert_groups(self) -> list[list[int]]:
        """The ranks that hold all experts together: of each, the same tensor-parallel shard."""
        groups: list[list[int]] = []
        for ranks in self.dp_groups():
            for first in range(0, self.dp_size, self.expert_size):
                groups.append(ranks[first : first + self.expert_size])
        return groups

    def replica_groups(self, replicas: int) -> list[list[int]]:
        """Groups of consecutive ranks that hold the same unit (see `sharding.Partition`)."""
        firsts = range(0, self.world_size, replicas)
        return [list(range(first, first + replicas)) for first in firsts]


@dataclass(frozen=True)
class ExpertParallel:
    """One rank's view of the ranks that share the experts of a mixture.

    A group of one needs no process group.

    Attributes:
        padded: whether a rank makes room for all rows that its experts could get, so that the host
            need not wait for their number (see `parallel.expert_rows`).
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    padded: bool = False


ALL_EXPERTS = ExpertParallel()


@dataclass(frozen=True)
class TensorParallel:
    """One rank's view of its tensor-parallel group. A group of one needs no process group.

    Attributes:
        expert_parallel: its view of the ranks that share experts, which are data-parallel ranks
            with the same tensor-parallel shard. It is here because the same layers need both.
        replica_groups: by how many ranks hold the same unit, the group of those that do.
        sequence_parallel: whether activations are split by position between regions (see
            `parallel.collectives`).
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    replica_groups: tuple[tuple[int, dist.ProcessGroup], ...] = ()
    sequence_parallel: bool = False
    expert_parallel: ExpertParallel = ALL_EXPERTS

    def replica_group(self, replicas: int) -> dist.ProcessGroup | None:
        """The group of the ranks that hold the same unit as this one."""
        if replicas == self.size:
            return self.group
        return dict(self.replica_groups)[replicas]


SINGLE = TensorParallel()


def check_sequence_length(sequence_length: int, tp: TensorParallel) -> None:
    """Checks that sequence parallelism can split a sequence evenly over the ranks.

    Raises:
        LayoutError: it cannot.
    """
    if tp.sequence_parallel and sequence_length % tp.size:
        raise LayoutError(
            "data.sequence_length: parallel.sequence_parallel needs a multiple of "
            f"parallel.tp_size {tp.size}, found {sequence_length}"
        )


class ProcessGroups:
    """The process groups of a layout; also the `mpu` object of DeepSpeed.

    Making it is a collective: all ranks of the world create their groups in one order.
    """

    def __init__(
        self,
        layout: Layout,
        timeout: timedelta | None = None,
        *,
        sequence_parallel: bool = False,
        padded_experts: bool = False,
    ) -> None:
        """`timeout` is how long a collective waits for a rank; None takes the backend's default.

        `sequence_parallel` and `padded_experts` are as in the run's section `parallel`.
        """
        self.layout = layout
        self._timeout = timeout
        self.rank = dist.get_rank()
        self._tp_group = self._own_group(layout.tp_groups())
        self._dp_group = self._own_group(layout.dp_groups())
        replica_groups: list[tuple[int, dist.ProcessGroup]] = []
        for replicas in range(2, layout.tp_size):
            if layout.tp_size % replicas == 0:
                own_group = self._own_group(layout.replica_groups(replicas))
                replica_groups.append((replicas, own_group))
        expert_parallel = ALL_EXPERTS
        if layout.expert_size > 1:
            expert_parallel = ExpertParallel(
                rank=layout.expert_rank(self.rank),
                size=layout.expert_size,
                group=self._own_group(layout.expert_groups()),
                padded=padded_experts,
            )
        self.tensor_parallel = TensorParallel(
            rank=layout.tp_rank(self.rank),
            size=layout.tp_size,
            group=self._tp_group,
            replica_groups=tuple(replica_groups),
            sequence_parallel=sequence_parallel and layout.tp_size > 1,
            expert_parallel=expert_parallel,
        )

    def _own_group(self, groups: list[list[int]]) -> dist.ProcessGroup:
        # A rank waits for its own group's ranks only: a thousand groups, made by all ranks each,
        # would take minutes.
        own = next(ranks for ranks in groups if self.rank in ranks)
        return dist.new_group(own, timeout=self._timeout, use_local_synchronization=True)

    # The names below are DeepSpeed's.
    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tp_group

    def get_model_parallel_rank(self) -> int:
        return self.layout.tp_rank(self.rank)

    def get_model_parallel_world_size(self) -> int:
        return self.layout.tp_size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self.rank - self.layout.tp_rank(self.rank)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._dp_group

    def get_data_parallel_rank(self) -> int:
        return self.layout.dp_rank(self.rank)

    def get_data_parallel_world_size(self) -> int:
        return self.layout.dp_size

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.layout.dp_groups()[self.layout.tp_rank(self.rank)]
