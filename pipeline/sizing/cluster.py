"""The machines a run is planned for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

GIB = 2**30
USABLE_FRACTION = 0.9
"""Of a GPU's memory: the rest goes to the CUDA context, NCCL's buffers and fragmentation."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs. Bandwidths are what one GPU sends in one direction, in GB/s.

    `mfu` is the share of the peak that the matrix products reach, those of recomputed activations included.
    """

    gpus: int
    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0
    peak_tflops: float = 989.0
    mfu: float = 0.4
    node_gb_per_s: float = 300.0
    network_gb_per_s: float = 40.0

    @property
    def usable_bytes(self) -> float:
        """What a run may fill of one GPU."""
        return self.gpu_memory_gib * GIB * USABLE_FRACTION


def add_cluster_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options that `cluster_of` reads; those that are not given are left out of the namespace."""

    def add(name: str, kind: type, meaning: str) -> None:
        default = getattr(Cluster, name, None)
        said = meaning if default is None else f"{meaning}; default {default:g}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS, help=said)

    add("gpus", int, "how many in all; how many ranks where there are none")
    add("gpus_per_node", int, "how many of them share a node")
    add("gpu_memory_gib", float, "of one GPU")
    add("peak_tflops", float, "of one GPU, dense")
    add("mfu", float, "share of the peak that is reached")
    add("node_gb_per_s", float, "what a GPU sends in its node")
    add("network_gb_per_s", float, "what a GPU sends to other nodes")


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The cluster that `arguments` describe; `gpus` must be among them."""
    given = vars(arguments)
    return Cluster(**{field.name: given[field.name] for field in fields(Cluster) if field.name in given})
