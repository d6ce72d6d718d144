"""What a GPU sends in a step, by purpose, and over which link.

Collectives are rings: of a payload P over n ranks each sends P·(n−1)/n to gather or to reduce and scatter, twice that
to all-reduce. All of a ring's n edges carry as much; with m members on each node one edge in m leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.gathering import Gathering
from pipeline.sizing.memory import ZeroSettings, partition_size
from pipeline.sizing.micro_batch import MicroBatchCosts


@dataclass(frozen=True)
class Traffic:
    """One purpose's messages in a step.

    Attributes:
        purpose: what for.
        collective: `all-gather`, `reduce-scatter` or `all-reduce`.
        payload_bytes: the length of the whole messages, as they are handed to the collectives.
        group_size: over how many ranks.
        inside_bytes, between_bytes: what a GPU sends to its own node's, and (on average) to other nodes'.
    """

    purpose: str
    collective: str
    payload_bytes: int
    group_size: int
    inside_bytes: float
    between_bytes: float

    @property
    def sent_bytes(self) -> float:
        """What a GPU sends in all."""
        return self.inside_bytes + self.between_bytes

    def seconds(self, cluster: Cluster) -> float:
        """How long a ring takes that nothing else disturbs."""
        return max(self.sent_bytes / cluster.node_gb_per_s, self.between_bytes / cluster.network_gb_per_s) / 1e9


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
    made = []
    if layout.dp_size > 1:
        gathered = trained * zero.dtype.itemsize
        if gathering is not None:
            gathered = _zero3_gathers(costs, zero, layout.dp_size, gathering, micro_batches)
        times = 1 if zero.stage == 1 else micro_batches
        reduced = trained * zero.communication_dtype.itemsize * times
        scatters = zero.stage == 3
        made.append(_traffic(GATHER, "all-gather", gathered, layout.dp_size, members))
        made.append(_traffic(REDUCE, "reduce-scatter" if scatters else "all-reduce", reduced, layout.dp_size, members))
    for (group_size, collective), payload in sorted(costs.payload_bytes.items()):
        on_node = min(group_size, cluster.gpus_per_node)
        made.append(_traffic(TENSOR_PARALLEL, collective, payload * micro_batches, group_size, on_node))
    return made


def _zero3_gathers(
    costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int, gathering: Gathering, micro_batches: int
) -> int:
    """Every micro-batch gathers; parameters that are always whole are gathered once, after the update."""
    persistent = [size for size in costs.parameter_sizes if size <= zero.gathering.param_persistence_threshold]
    whole = sum(partition_size(size, dp_size) * dp_size for size in persistent)
    return (gathering.gathered * micro_batches + whole) * zero.dtype.itemsize


def _traffic(purpose: str, collective: str, payload: int, group_size: int, members: int) -> Traffic:
    """A ring over `group_size` ranks, `members` of them on each node."""
    passes = 2 if collective == "all-reduce" else 1
    sent = passes * payload * (group_size - 1) / group_size
    leaves = ceil(group_size / members) > 1
    between = sent / members if leaves else 0.0
    return Traffic(purpose, collective, payload, group_size, sent - between, between)
