"""The messages that a GPU sends in a step, by purpose and by link, and the gathers of ZeRO-3.

Collectives are rings: of a payload P over n ranks, each rank sends P·(n−1)/n in an all-gather or a
reduce-scatter, and twice that in an all-reduce. All n edges of a ring carry the same; with m
members on each node, one edge in m leaves it. An all-to-all sends P/n to each of the other ranks,
of which n−m are on other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.micro_batch import MicroBatchCosts, total_elements

GATHER = "parameter gathers"
REDUCE = "gradient reduction"
TENSOR_PARALLEL = "tensor parallelism"
EXPERT_PARALLEL = "experts over ranks"
MUON = "matrices for Muon"
_MUON_BYTES = 2
"""Bytes of an element that is sent for Muon: bf16, in which a matrix is orthogonalised."""


def partition_size(size: int, dp_size: int) -> int:
    """The elements of a rank's partition of `size` elements; that of the last rank is padded."""
    # -(-a // b) is a / b, rounded up.
    return -(-size // dp_size)


class Gathering(NamedTuple):
    """The elements that ZeRO-3 gathers in a micro-batch: in total, and the most at once."""

    total: int
    most_at_once: int


def estimate_gathering(costs: MicroBatchCosts, zero: DeepSpeedConfig) -> Gathering:
    """The parameters that DeepSpeed gathers in a micro-batch; none below ZeRO-3.

    It gathers each parameter once for the forward pass. Some stay for the backward pass: with
    prefetching up to `max_live_parameters` elements, without it those that were used last, within
    `max_reuse_distance`. All others are gathered again if the backward pass reads them. Frozen
    parameters of a recomputed layer are always released and gathered once more (see DeepSpeed's
    `PartitionedParameterCoordinator.release_sub_module`). Parameters of at most
    `param_persistence_threshold` elements are never released, so they are not gathered.
    """
    if zero.zero_stage < 3:
        return Gathering(0, 0)
    threshold = zero.elements("stage3_param_persistence_threshold")
    partitioned = []
    for parameter in costs.parameters:
        if parameter.size > threshold and not parameter.kept_whole:
            partitioned.append(parameter)
    if not partitioned:
        return Gathering(0, 0)
    whole = total_elements(partitioned)

    # Between the use of a parameter in the forward pass and in the backward pass, every later
    # parameter is used twice. So the parameters within a reuse distance are half of it.
    kept = zero.elements("stage3_max_reuse_distance") // 2
    if zero.elements("stage3_prefetch_bucket_size"):
        kept = max(kept, zero.elements("stage3_max_live_parameters"))
    kept = min(kept, whole)

    read_again = 0
    recomputed = 0
    largest = 0
    for parameter in partitioned:
        largest = max(largest, parameter.size)
        if parameter.read_again:
            read_again += parameter.size
        if parameter.recomputed:
            recomputed += parameter.size
    again = round(read_again * (1 - kept / whole))
    return Gathering(total=whole + again + recomputed, most_at_once=min(whole, kept + largest))


@dataclass(frozen=True)
class Traffic:
    """One purpose's messages in a step.

    Attributes:
        purpose: `GATHER`, `REDUCE`, `TENSOR_PARALLEL`, `EXPERT_PARALLEL` or `MUON`.
        collective: `all-gather`, `reduce-scatter`, `all-reduce` or `all-to-all`.
        payload_bytes: the total length of the messages, as passed to the collectives.
        group_size: the number of ranks in a group.
        on_node: how many ranks of a group share a node.
    """

    purpose: str
    collective: str
    payload_bytes: int
    group_size: int
    on_node: int

    @property
    def sent_bytes(self) -> float:
        """The bytes that a GPU sends."""
        # A ring all-reduce is a reduce-scatter followed by an all-gather. No other algorithm sends
        # less from each rank (Patarasuk and Yuan 2009).
        passes = 2 if self.collective == "all-reduce" else 1
        return passes * self.payload_bytes * (self.group_size - 1) / self.group_size

    @property
    def between_bytes(self) -> float:
        """The bytes of them that go to other nodes, on average over the GPUs."""
        if self.group_size <= self.on_node:
            return 0.0
        if self.collective == "all-to-all":
            return self.payload_bytes * (self.group_size - self.on_node) / self.group_size
        # Ranks of a node are neighbours in NCCL's rings: of every `on_node` edges one crosses to
        # the next node.
        return self.sent_bytes / self.on_node

    def seconds(self, cluster: Cluster) -> float:
        """The seconds that the messages take, without contention."""
        within = self.sent_bytes / cluster.node_gb_per_s
        between = self.between_bytes / cluster.network_gb_per_s
        # Both links carry the same ring at the same time: the slower one decides.
        return max(within, between) / 1e9


def estimate_traffic(
    costs: MicroBatchCosts,
    zero: DeepSpeedConfig,
    layout: Layout,
    micro_batches: int,
    cluster: Cluster,
) -> list[Traffic]:
    """The messages of a rank in an optimizer step of `micro_batches`."""
    traffic: list[Traffic] = []
    if layout.dp_size > 1:
        traffic += _data_parallel(costs, zero, layout, micro_batches, cluster)

    in_matrices = total_elements(costs.in_matrices)
    if in_matrices > 0 and layout.world_size > 1:
        # A rank sends its elements to the owners of their matrices, and gets the updates back.
        on_node = min(layout.world_size, cluster.gpus_per_node)
        payload = 2 * _MUON_BYTES * partition_size(in_matrices, layout.dp_size)
        traffic.append(Traffic(MUON, "all-to-all", payload, layout.world_size, on_node))

    for (size, collective), payload in sorted(costs.payload_bytes.items()):
        on_node = min(size, cluster.gpus_per_node)
        payload *= micro_batches
        traffic.append(Traffic(TENSOR_PARALLEL, collective, payload, size, on_node))

    for (size, collective), payload in sorted(costs.expert_payload_bytes.items()):
        # These are data-parallel ranks: neighbours in rank are of the same tensor-parallel group,
        # so that fewer of these ranks share a node.
        on_node = max(1, min(size, cluster.gpus_per_node // layout.tp_size))
        payload *= micro_batches
        traffic.append(Traffic(EXPERT_PARALLEL, collective, payload, size, on_node))
    return traffic


def _data_parallel(
    costs: MicroBatchCosts,
    zero: DeepSpeedConfig,
    layout: Layout,
    micro_batches: int,
    cluster: Cluster,
) -> list[Traffic]:
    """The messages of a rank to the ranks that hold the same shards."""
    dp_size = layout.dp_size
    # A node holds whole tensor-parallel groups, so that fewer replicas share it.
    on_node = max(1, min(dp_size, cluster.gpus_per_node // layout.tp_size))

    gathered = _gathered_elements(costs, zero, dp_size, micro_batches) * zero.dtype.itemsize
    reduced = total_elements(costs.trained) * zero.communication_dtype.itemsize
    if zero.zero_stage > 1:
        # ZeRO-2 and 3 reduce in every micro-batch, ZeRO-1 once in a step.
        reduced *= micro_batches
    reduction = "reduce-scatter" if zero.zero_stage == 3 else "all-reduce"
    return [
        Traffic(GATHER, "all-gather", gathered, dp_size, on_node),
        Traffic(REDUCE, reduction, reduced, dp_size, on_node),
    ]


def _gathered_elements(
    costs: MicroBatchCosts, zero: DeepSpeedConfig, dp_size: int, micro_batches: int
) -> int:
    """The parameters that data-parallel ranks gather in a step."""
    if zero.zero_stage < 3:
        # Each rank updates its partition of the trained parameters, and gathers the others'.
        return total_elements(costs.trained)
    elements = estimate_gathering(costs, zero).total * micro_batches
    threshold = zero.elements("stage3_param_persistence_threshold")
    for parameter in costs.parameters:
        if parameter.size <= threshold and not parameter.kept_whole:
            # A parameter that is never released is gathered once, after the update.
            elements += partition_size(parameter.size, dp_size) * dp_size
    return elements
