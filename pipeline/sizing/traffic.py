"""What a GPU sends in a step, by purpose, and over which link; what ZeRO partitions, and what ZeRO-3 gathers.

Collectives are rings: of a payload P over n ranks, each rank sends P·(n−1)/n in an all-gather or a reduce-scatter, and
twice that in an all-reduce. All n edges of a ring carry the same; with m members on each node, one edge in m leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.micro_batch import MicroBatchCosts, ParameterUse

GATHER, REDUCE, TENSOR_PARALLEL = "parameter gathers", "gradient reduction", "tensor parallelism"
MUON = "whole matrices for Muon"


def partition_size(size: int, dp_size: int) -> int:
    """A rank's part of `size` elements; that of the last rank is padded."""
    return -(-size // dp_size)


class Gathering(NamedTuple):
    """What ZeRO-3 gathers in a micro-batch in total, and the most that is gathered at once. In elements."""

    total: int
    most_at_once: int


def estimate_gathering(costs: MicroBatchCosts, zero: DeepSpeedConfig) -> Gathering:
    """What DeepSpeed gathers in a micro-batch; nothing below ZeRO-3.

    It gathers each parameter once for the forward pass. Up to `max_live_parameters` elements are prefetched and stay
    for the backward pass, or those used last within `max_reuse_distance`; the others are gathered again if the backward
    pass reads them. Frozen parameters of a layer that is recomputed are always released and gathered once more: see
    `PartitionedParameterCoordinator.release_sub_module`. Parameters of at most `param_persistence_threshold` elements
    are never partitioned, so never gathered.
    """
    if zero.zero_stage < 3:
        return Gathering(0, 0)
    threshold = zero.elements("stage3_param_persistence_threshold")
    partitioned = [parameter for parameter in costs.parameters if parameter.size > threshold]
    whole = _elements(partitioned)
    live = (
        zero.elements("stage3_max_live_parameters")
        if zero.elements("stage3_prefetch_bucket_size")
        else 0
    )
    kept = min(
        whole, max(live, zero.elements("stage3_max_reuse_distance") // 2)
    )  # a way up and down again
    again = (
        _elements(one for one in partitioned if one.read_again) * (1 - kept / whole) if whole else 0
    )
    total = whole + round(again) + _elements(one for one in partitioned if one.recomputed)
    return Gathering(total, min(whole, kept + max((one.size for one in partitioned), default=0)))


def _elements(parameters: Iterable[ParameterUse]) -> int:
    return sum(parameter.size for parameter in parameters)


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
        return (
            max(
                self.sent_bytes / cluster.node_gb_per_s,
                self.between_bytes / cluster.network_gb_per_s,
            )
            / 1e9
        )


def estimate_traffic(
    costs: MicroBatchCosts,
    zero: DeepSpeedConfig,
    layout: Layout,
    micro_batches: int,
    cluster: Cluster,
) -> list[Traffic]:
    """The messages of a rank in an optimizer step of `micro_batches`."""
    trained, dp_size, tp_size = _elements(costs.trained), layout.dp_size, layout.tp_size
    by_muon = [parameter for parameter in costs.parameters if parameter.muon_size]
    traffic = []
    if dp_size > 1:
        updated = trained
        if (
            zero.zero_stage == 3
        ):  # parameters that are never partitioned are gathered once, after the update
            threshold = zero.elements("stage3_param_persistence_threshold")
            sizes = (
                parameter.size for parameter in costs.parameters if parameter.size <= threshold
            )
            gathered = estimate_gathering(costs, zero).total
            updated = gathered * micro_batches + sum(
                partition_size(size, dp_size) * dp_size for size in sizes
            )
        reduced = (
            trained
            * zero.communication_dtype.itemsize
            * (1 if zero.zero_stage == 1 else micro_batches)
        )
        reduction = "reduce-scatter" if zero.zero_stage == 3 else "all-reduce"
        on_node = max(1, min(dp_size, cluster.gpus_per_node // tp_size))
        traffic.append(
            Traffic(GATHER, "all-gather", updated * zero.dtype.itemsize, dp_size, on_node)
        )
        traffic.append(Traffic(REDUCE, reduction, reduced, dp_size, on_node))
        if by_muon:
            traffic.append(Traffic(MUON, "all-reduce", 4 * _elements(by_muon), dp_size, on_node))
    if split := _elements(one for one in by_muon if one.split):
        on_node = min(tp_size, cluster.gpus_per_node)
        traffic.append(Traffic(MUON, "all-gather", 4 * split * tp_size, tp_size, on_node))
    for (size, collective), payload in sorted(costs.payload_bytes.items()):
        on_node = min(size, cluster.gpus_per_node)
        traffic.append(Traffic(TENSOR_PARALLEL, collective, payload * micro_batches, size, on_node))
    return traffic
