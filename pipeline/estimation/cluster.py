"""The machines a run is planned for."""

from __future__ import annotations

from dataclasses import dataclass

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
