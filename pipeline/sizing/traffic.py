"""What a GPU sends in a step, by purpose, and over which link.

Collectives are rings: of a payload P over n ranks, each rank sends P·(n−1)/n in an all-gather or a reduce-scatter, and
twice that in an all-reduce. All n edges of a ring carry the same; with m members on each node, one edge in m leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.micro_batch import MicroBatchCosts
from pipeline.sizing.zero import ZeroSettings, estimate_gathering, partition_size

GATHER, REDUCE, TENSOR_PARALLEL = "parameter gathers", "gradient reduction", "tensor parallelism"
MUON = "whole matrices for Muon"


@dataclass(frozen=True)
class Traffic:
    """One purpose's messages in a step.

    Attributes:
        purpose: `GATHER`, `REDUCE`, `TENSOR_PARALLEL` or `MUON`.
        collective: `all-gather`, `reduce-scatter` or `all-reduce`.
        payload_bytes: the total length of the messages, as passed to the collectives.
        group_size, on_node: over how many ranks, and how many of them share a node.
    """

    purpose: str
    collective: str
    payload_bytes: int
    group_size: int
    on_node: int

    @property
    def sent_bytes(self) -> float:
        """What a GPU sends."""
        passes = 2 if self.collective == "all-reduce" else 1
        return passes * self.payload_bytes * (self.group_size - 1) / self.group_size

    @property
    def between_bytes(self) -> float:
        """What of it goes to other nodes, on average."""
        return self.sent_bytes / self.on_node if self.group_size > self.on_node else 0.0

    def seconds(self, cluster: Cluster) -> float:
        """How long the rings take, without contention."""
        return max(self.sent_bytes / cluster.node_gb_per_s, self.between_bytes / cluster.network_gb_per_s) / 1e9


def estimate_traffic(
    costs: MicroBatchCosts, zero: ZeroSettings, layout: Layout, micro_batches: int, cluster: Cluster
) -> list[Traffic]:
    """The messages of a rank in an optimizer step of `micro_batches`."""
    trained, dp_size = sum(costs.trained_sizes), layout.dp_size
    traffic = []
    if dp_size > 1:
        updated = trained
        if zero.stage == 3:  # parameters that are never partitioned are gathered once, after the update
            persistent = (size for size in costs.parameter_sizes if size <= zero.param_persistence_threshold)
            gathered = estimate_gathering(costs, zero).total
            updated = gathered * micro_batches + sum(partition_size(size, dp_size) * dp_size for size in persistent)
        reduced = trained * zero.communication_dtype.itemsize * (1 if zero.stage == 1 else micro_batches)
        reduction = "reduce-scatter" if zero.stage == 3 else "all-reduce"
        on_node = max(1, min(dp_size, cluster.gpus_per_node // layout.tp_size))
        traffic.append(Traffic(GATHER, "all-gather", updated * zero.dtype.itemsize, dp_size, on_node))
        traffic.append(Traffic(REDUCE, reduction, reduced, dp_size, on_node))
        if costs.muon_sizes:
            traffic.append(Traffic(MUON, "all-reduce", 4 * sum(costs.muon_sizes), dp_size, on_node))
    if costs.muon_split:
        on_node = min(layout.tp_size, cluster.gpus_per_node)
        traffic.append(Traffic(MUON, "all-gather", 4 * costs.muon_split * layout.tp_size, layout.tp_size, on_node))
    for (size, collective), payload in sorted(costs.payload_bytes.items()):
        on_node = min(size, cluster.gpus_per_node)
        traffic.append(Traffic(TENSOR_PARALLEL, collective, payload * micro_batches, size, on_node))
    return traffic
