"""The cluster that a run is planned for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

GIB = 2**30
USABLE_FRACTION = 0.9
"""Of a GPU's memory; the rest is left for the CUDA context, NCCL's buffers and fragmentation."""


@dataclass(frozen=True)
class Cluster:
    """Identical nodes of identical GPUs. Bandwidths are those of one GPU in one direction, in GB/s.

    `mfu` is the share of the peak that matrix products reach, including those of recomputed activations.
    """

    gpus: int
    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0
    peak_tflops: float = 989.0
    mfu: float = 0.4
    node_gb_per_s: float = 300.0
    network_gb_per_s: float = 40.0

    @property
    def nodes(self) -> int:
        """How many nodes the GPUs fill, the last one perhaps in part."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def usable_bytes(self) -> float:
        """How much memory of one GPU a run may use."""
        return self.gpu_memory_gib * GIB * USABLE_FRACTION


def add_cluster_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options that `cluster_of` reads; those that are not given are left out of the namespace."""
    parser.add_argument("--gpus", type=int, default=argparse.SUPPRESS, help="in total; on CPUs, the number of ranks")
    for name, kind, meaning in (
        ("gpus_per_node", int, "GPUs that share a node"),
        ("gpu_memory_gib", float, "memory of one GPU"),
        ("peak_tflops", float, "dense peak of one GPU"),
        ("mfu", float, "share of the peak that is reached"),
        ("node_gb_per_s", float, "bandwidth of a GPU within its node"),
        ("network_gb_per_s", float, "bandwidth of a GPU to other nodes"),
    ):
        flag, text = f"--{name.replace('_', '-')}", f"{meaning}; default {getattr(Cluster, name):g}"
        parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text)


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The cluster that `arguments` describe; `gpus` must be given."""
    given = vars(arguments)
    return Cluster(**{field.name: given[field.name] for field in fields(Cluster) if field.name in given})
