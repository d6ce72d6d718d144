"""The cluster that a run is planned for."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from typing import NamedTuple

from pipeline.errors import ConfigError
from pipeline.sizing.host_memory import machine_memory

GIB = 2**30
USABLE_FRACTION = 0.9
"""The share of a GPU's memory that a run may use.

The rest is left for the CUDA context, NCCL's buffers and fragmentation."""

MEMORY_ERROR = 0.05
"""By what share an estimate of memory may be wrong: recommended layouts leave so much free."""


class GpuClass(NamedTuple):
    """A common GPU, for which an unnamed one with so much memory is taken.

    Attributes:
        most_gib: the most memory of one that counts as this GPU.
        name: its name.
        peak_tflops: its dense 16-bit peak, from NVIDIA's data sheet.
    """

    most_gib: float
    name: str
    peak_tflops: float


_GPU_CLASSES = (
    GpuClass(17.0, "T4", 65.0),
    GpuClass(34.0, "A10", 125.0),
    GpuClass(50.0, "A100", 312.0),
    GpuClass(float("inf"), "H100", 989.0),
)
_DENSE_MFU = 0.4
"""Compiled steps of a 1B Adapt reached 0.41 on an H100, others 0.35 (docs/gpu.md)."""
_MIXTURE_MFU = 0.25
"""An assumption: no mixture was measured. Products of single experts are small."""


@dataclass(frozen=True)
class Cluster:
    """Identical nodes of identical GPUs, or processes on CPUs.

    Attributes:
        gpus: in total.
        gpus_per_node: GPUs that share a node.
        gpu_memory_gib: memory of one GPU.
        peak_tflops: dense peak of one GPU; None: that of a common GPU with as much memory, or on
            CPUs, what a process reaches.
        mfu: share of the peak that is reached, with the FLOPs of recomputed activations counted;
            None: what is usual for the base.
        node_gb_per_s: bandwidth of one GPU to others of its node, in one direction.
        network_gb_per_s: bandwidth of one GPU to other nodes, in one direction.
        on_cpu: there are no GPUs; each rank is a process with its share of a node's memory. Its
            speed is measured where it is not given: see `sizing.cpu_speed`.
    """

    gpus: int
    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0
    peak_tflops: float | None = None
    mfu: float | None = None
    node_gb_per_s: float = 300.0
    network_gb_per_s: float = 40.0
    on_cpu: bool = False

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name != "on_cpu" and value is not None and value <= 0:
                raise ConfigError(
                    f"--{setting.name.replace('_', '-')}: expected a number above 0, found {value}"
                )
        if self.mfu is not None and self.mfu > 1:
            raise ConfigError(f"--mfu: expected a share of the peak, 0 to 1, found {self.mfu}")

    @property
    def nodes(self) -> int:
        """The number of nodes; the last one may have fewer GPUs."""
        # -(-a // b) is a / b, rounded up.
        return -(-self.gpus // self.gpus_per_node)

    @property
    def gpu_class(self) -> GpuClass:
        """The common GPU that a GPU of this memory is taken for."""
        for gpu_class in _GPU_CLASSES:
            if self.gpu_memory_gib <= gpu_class.most_gib:
                return gpu_class
        raise AssertionError("the last class has no bound")

    @property
    def processes(self) -> str:
        """What the ranks are, for a message."""
        return "CPU processes" if self.on_cpu else "GPUs"

    @property
    def usable_bytes(self) -> float:
        """How much memory of one GPU a run may use."""
        return self.gpu_memory_gib * GIB * USABLE_FRACTION

    @property
    def recommended_bytes(self) -> float:
        """The largest estimate of memory with which a layout is recommended."""
        return self.usable_bytes * (1 - MEMORY_ERROR)


@dataclass(frozen=True)
class Speed:
    """What a rank computes in a second of training.

    Attributes:
        peak_tflops: the dense peak.
        mfu: the share of the peak that is reached.
        source: where both come from, for a message.
    """

    peak_tflops: float
    mfu: float
    source: str

    @property
    def flops_per_second(self) -> float:
        return self.peak_tflops * 1e12 * self.mfu

    def __str__(self) -> str:
        share = "" if self.mfu == 1 else f" at MFU {self.mfu:.2f}"
        return f"{self.peak_tflops:,.4g} TFLOP/s{share}, {self.source}"


def gpu_speed(cluster: Cluster, *, has_experts: bool) -> Speed:
    """The speed of one GPU, from what `cluster` gives, and assumptions for the rest.

    has_experts: whether the base is a mixture of experts.
    """
    sources: list[str] = []
    peak_tflops = cluster.peak_tflops
    if peak_tflops is None:
        peak_tflops = cluster.gpu_class.peak_tflops
        sources.append(f"the peak of an {cluster.gpu_class.name} (--peak-tflops)")
    mfu = cluster.mfu
    if mfu is None and has_experts:
        mfu = _MIXTURE_MFU
        sources.append("an MFU that nobody has measured for mixtures of experts (--mfu)")
    elif mfu is None:
        mfu = _DENSE_MFU
        sources.append("an MFU measured on one H100 (--mfu)")
    source = "as given"
    if sources:
        source = "assumed: " + ", ".join(sources)
    return Speed(peak_tflops, mfu, source)


def add_cluster_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options that `cluster_of` reads.

    Options that are not given are missing in the namespace: their defaults are this machine's.
    """
    parser.add_argument(
        "--gpus", type=int, default=argparse.SUPPRESS, help="in total (default: this machine's)"
    )
    for name, kind, meaning in (
        ("gpus_per_node", int, "GPUs that share a node; default 8"),
        ("gpu_memory_gib", float, "memory of one GPU; default 80"),
        (
            "peak_tflops",
            float,
            "dense peak of one GPU; default: of an H100, or of a smaller GPU with less memory",
        ),
        (
            "mfu",
            float,
            f"share of the peak that is reached; default {_DENSE_MFU}, for mixtures {_MIXTURE_MFU}",
        ),
        ("node_gb_per_s", float, "bandwidth of a GPU within its node; default 300"),
        ("network_gb_per_s", float, "bandwidth of a GPU to other nodes; default 40"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS, help=meaning
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
    ranks = _wanted_ranks()
    if ranks is None:
        ranks = 2 if on_cpu else torch.cuda.device_count()
    found: dict[str, object] = {"gpus": ranks, "gpus_per_node": ranks, "on_cpu": on_cpu}
    if on_cpu:
        # Ranks on a CPU share the memory of the machine.
        memory = machine_memory() / ranks
    else:
        # Here, because on CPUs nothing needs it, and it loads what builds a model.
        from pipeline.sizing.mfu import dense_tflops

        devices = [torch.cuda.get_device_properties(number) for number in range(ranks)]
        # All ranks have the same layout: the smallest GPU decides.
        memory = min(device.total_memory for device in devices)
        found["peak_tflops"] = dense_tflops(devices[0].name)
    found["gpu_memory_gib"] = max(1.0, round(memory / GIB, 1))
    return found


def _wanted_ranks() -> int | None:
    """The ranks of a machine that NPROC sets; None: it does not."""
    wanted = os.environ.get("NPROC", "")
    if not wanted:
        return None
    if not wanted.isdecimal() or int(wanted) == 0:
        raise ConfigError(f"NPROC: expected a number of processes, 1 or more, found {wanted!r}")
    return int(wanted)
