"""What a GPU sends in a step, by purpose, and over which link.

Collectives are rings: of a payload P over n ranks, each rank sends P·(n−1)/n in an all-gather or a reduce-scatter, and
twice that in an all-reduce. All n edges of a ring carry the same; with m members on each node, one edge in m leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.gathering import Gathering
from pipeline.sizing.memory import ZeroSettings, partition_size
from pipeline.sizing.micro_batch import MicroBatchCosts


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

    def seconds(self, cluster: Cluster) -> float:
        """How long the rings take, without contention."""
        sent_bytes = self.inside_bytes + self.between_bytes
        return max(sent_bytes / cluster.node_gb_per_s, self.between_bytes / cluster.network_gb_per_s) / 1e9


GATHER, REDUCE, TENSOR_PARALLEL = "parameter gathers", "gradient reduction", "tensor parallelism"


def estimate_traffic(
    costs: MicroBatchCosts,
    zero: ZeroSettings,
    layout: Layout,
    micro_batches: int,
    gathering: Gathering | None,
    cluster: Cluster,
) -> list[Traffic]:
    """The messages of one optimizer step of `micro_batches` on each rank."""
    members = max(1, min(layout.dp_size, cluster.gpus_per_node // layout.tp_size))
    trained = sum(costs.trained_sizes)
    traffic = []
    if layout.dp_size > 1:
        gathered = trained * zero.dtype.itemsize
        if gathering is not None:
            # Every micro-batch gathers; parameters that are never partitioned are gathered once, after the update.
            threshold = zero.gathering.param_persistence_threshold
            persistent = sum(
                partition_size(size, layout.dp_size) * layout.dp_size
                for size in costs.parameter_sizes
                if size <= threshold
            )
            gathered = (gathering.gathered * micro_batches + persistent) * zero.dtype.itemsize
        times = 1 if zero.stage == 1 else micro_batches
        reduced = trained * zero.communication_dtype.itemsize * times
        reduction = "reduce-scatter" if zero.stage == 3 else "all-reduce"
        traffic.append(_traffic(GATHER, "all-gather", gathered, layout.dp_size, members))
        traffic.append(_traffic(REDUCE, reduction, reduced, layout.dp_size, members))
    for (group_size, collective), payload in sorted(costs.payload_bytes.items()):
        on_node = min(group_size, cluster.gpus_per_node)
        traffic.append(_traffic(TENSOR_PARALLEL, collective, payload * micro_batches, group_size, on_node))
    return traffic


def _traffic(purpose: str, collective: str, payload: int, group_size: int, members: int) -> Traffic:
    """A ring over `group_size` ranks, `members` of them on each node."""
    passes = 2 if collective == "all-reduce" else 1
    sent = passes * payload * (group_size - 1) / group_size
    between = sent / members if group_size > members else 0.0
    return Traffic(purpose, collective, payload, group_size, sent - between, between)
