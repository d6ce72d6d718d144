"""The cluster that a run is planned for."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields

from pipeline.errors import ConfigError

GIB = 2**30
USABLE_FRACTION = 0.9
"""The share of a GPU's memory that a run may use.

The rest is left for the CUDA context, NCCL's buffers and fragmentation."""

MEMORY_ERROR = 0.05
"""By what share an estimate of memory may be wrong: recommended layouts leave so much free."""


@dataclass(frozen=True)
class Cluster:
    """Identical nodes of identical GPUs.

    Attributes:
        gpus: in total.
        gpus_per_node: GPUs that share a node.
        gpu_memory_gib: memory of one GPU.
        peak_tflops: dense peak of one GPU.
        mfu: share of the peak that is reached, with the FLOPs of recomputed activations counted.
        node_gb_per_s: bandwidth of one GPU to others of its node, in one direction.
        network_gb_per_s: bandwidth of one GPU to other nodes, in one direction.
        on_cpu: there are no GPUs; each rank is a process with its share of a node's memory, of
            unknown speed.
    """

    gpus: int
    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0
    peak_tflops: float = 989.0
    mfu: float = 0.4
    node_gb_per_s: float = 300.0
    network_gb_per_s: float = 40.0
    on_cpu: bool = False

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name != "on_cpu" and value <= 0:
                raise ConfigError(
                    f"--{setting.name.replace('_', '-')}: expected a number above 0, found {value}"
                )
        if self.mfu > 1:
            raise ConfigError(f"--mfu: expected a share of the peak, 0 to 1, found {self.mfu}")

    @property
    def nodes(self) -> int:
        """The number of nodes; the last one may have fewer GPUs."""
        # -(-a // b) is a / b, rounded up.
        return -(-self.gpus // self.gpus_per_node)

    @property
    def usable_bytes(self) -> float:
        """How much memory of one GPU a run may use."""
        return self.gpu_memory_gib * GIB * USABLE_FRACTION

    @property
    def recommended_bytes(self) -> float:
        """The largest estimate of memory with which a layout is recommended."""
        return self.usable_bytes * (1 - MEMORY_ERROR)


def add_cluster_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options that `cluster_of` reads.

    Options that are not given are missing in the namespace: their defaults are this machine's.
    """
    parser.add_argument(
        "--gpus", type=int, default=argparse.SUPPRESS, help="in total (default: this machine's)"
    )
    for name, kind, meaning in (
        ("gpus_per_node", int, "GPUs that share a node"),
        ("gpu_memory_gib", float, "memory of one GPU"),
        ("peak_tflops", float, "dense peak of one GPU"),
        ("mfu", float, "share of the peak that is reached"),
        ("node_gb_per_s", float, "bandwidth of a GPU within its node"),
        ("network_gb_per_s", float, "bandwidth of a GPU to other nodes"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=argparse.SUPPRESS,
            help=f"{meaning}; default {getattr(Cluster, name):g}",
        )
    parser.add_argument(
        "--on-cpu",
        action="store_true",
        default=argparse.SUPPRESS,
        help="there are no GPUs: --gpus are CPU processes, each with --gpu-memory-gib",
    )


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The cluster that `arguments` describe.

    Without `gpus` it is this machine, some of whose properties they may change.
    """
    given = vars(arguments)
    if "gpus" not in given:
        given = {**_this_machine(), **given}
    known = {}
    for field in fields(Cluster):
        if field.name in given:
            known[field.name] = given[field.name]
    return Cluster(**known)


def _this_machine() -> dict[str, object]:
    """This machine's GPUs; without any, processes that share its memory.

    NPROC sets the number of processes, as in slurm/.
    """
    # Here, because --help does not wait for torch.
    import torch

    on_cpu = not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu"
    if os.environ.get("NPROC"):
        ranks = int(os.environ["NPROC"])
    else:
        ranks = 2 if on_cpu else torch.cuda.device_count()
    if on_cpu:
        # Ranks on a CPU share the memory of the machine.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks
    else:
        # All ranks have the same layout: the smallest GPU decides.
        memory = min(
            torch.cuda.get_device_properties(number).total_memory for number in range(ranks)
        )
    gib = max(1.0, round(memory / GIB, 1))
    return {"gpus": ranks, "gpus_per_node": ranks, "gpu_memory_gib": gib, "on_cpu": on_cpu}
