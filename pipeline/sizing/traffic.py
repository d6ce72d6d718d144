"""What a GPU sends in a step, by purpose, and over which link; and what ZeRO-3 gathers.

Collectives are rings: of a payload P over n ranks, each rank sends P·(n−1)/n in an all-gather or a reduce-scatter, and
twice that in an all-reduce. All n edges of a ring carry the same; with m members on each node, one edge in m leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.memory import partition_size
from pipeline.sizing.micro_batch import MicroBatchCosts
from pipeline.sizing.zero import GatherSettings, ZeroSettings

GATHER, REDUCE, TENSOR_PARALLEL = "parameter gathers", "gradient reduction", "tensor parallelism"


@dataclass(frozen=True)
class Traffic:
    """One purpose's messages in a step.

    Attributes:
        purpose: `GATHER`, `REDUCE` or `TENSOR_PARALLEL`.
        collective: `all-gather`, `reduce-scatter` or `all-reduce`.
        payload_bytes: the total length of the messages, as passed to the collectives.
        group_size: over how many ranks.
        inside_bytes, between_bytes: what a GPU sends to GPUs of its own node, and (on average) of other nodes.
    """

    purpose: str
    collective: str
    payload_bytes: int
    group_size: int
    inside_bytes: float
    between_bytes: float

    @classmethod
    def ring(cls, purpose: str, collective: str, payload_bytes: int, group_size: int, on_node: int) -> Traffic:
        """A ring over `group_size` ranks, `on_node` of them on each node."""
        passes = 2 if collective == "all-reduce" else 1
        sent = passes * payload_bytes * (group_size - 1) / group_size
        between = sent / on_node if group_size > on_node else 0.0
        return cls(purpose, collective, payload_bytes, group_size, sent - between, between)

    def seconds(self, cluster: Cluster) -> float:
        """How long the rings take, without contention."""
        sent_bytes = self.inside_bytes + self.between_bytes
        return max(sent_bytes / cluster.node_gb_per_s, self.between_bytes / cluster.network_gb_per_s) / 1e9


def estimate_traffic(
    costs: MicroBatchCosts,
    zero: ZeroSettings,
    layout: Layout,
    micro_batches: int,
    gathered_elements: int,
    cluster: Cluster,
) -> list[Traffic]:
    """The messages of one optimizer step of `micro_batches`, each of which gathers as much, on each rank."""
    trained, dp_size = sum(costs.trained_sizes), layout.dp_size
    traffic = []
    if dp_size > 1:
        gathered = trained
        if zero.stage == 3:  # parameters that are never partitioned are gathered once, after the update
            persistent = (size for size in costs.parameter_sizes if size <= zero.gathering.param_persistence_threshold)
            gathered = gathered_elements * micro_batches
            gathered += sum(partition_size(size, dp_size) * dp_size for size in persistent)
        times = 1 if zero.stage == 1 else micro_batches
        reduced = trained * zero.communication_dtype.itemsize * times
        reduction = "reduce-scatter" if zero.stage == 3 else "all-reduce"
        on_node = max(1, min(dp_size, cluster.gpus_per_node // layout.tp_size))
        traffic.append(Traffic.ring(GATHER, "all-gather", gathered * zero.dtype.itemsize, dp_size, on_node))
        traffic.append(Traffic.ring(REDUCE, reduction, reduced, dp_size, on_node))
    for (group_size, collective), payload in sorted(costs.payload_bytes.items()):
        on_node = min(group_size, cluster.gpus_per_node)
        traffic.append(Traffic.ring(TENSOR_PARALLEL, collective, payload * micro_batches, group_size, on_node))
    return traffic


@dataclass(frozen=True)
class Gathering:
    """What ZeRO-3 gathers in a micro-batch in total, and the most that is gathered at once. In elements."""

    gathered: int = 0
    most_at_once: int = 0


def estimate_gathering(costs: MicroBatchCosts, settings: GatherSettings) -> Gathering:
    """What DeepSpeed gathers in a micro-batch.

    It gathers each parameter once for the forward pass. Up to `max_live_parameters` elements are prefetched and stay
    for the backward pass, or those used last within `max_reuse_distance`; the others are gathered again if the backward
    pass reads them. Frozen parameters of a layer that is recomputed are always released and gathered once more: see
    `PartitionedParameterCoordinator.release_sub_module`. Parameters of at most `param_persistence_threshold` elements
    are never partitioned, so never gathered.
    """

    def partitioned(sizes: Sequence[int]) -> list[int]:
        return [size for size in sizes if size > settings.param_persistence_threshold]

    whole, returning = sum(partitioned(costs.parameter_sizes)), sum(partitioned(costs.returning_sizes))
    live = settings.max_live_parameters if settings.prefetch_bucket_size else 0
    kept = min(whole, max(live, settings.max_reuse_distance // 2))  # a way up and down again
    again = returning * (1 - kept / whole) if whole else 0
    gathered = whole + round(again) + sum(partitioned(costs.recomputed_sizes))
    return Gathering(gathered, min(whole, kept + max(partitioned(costs.parameter_sizes), default=0)))
