"""What a run measures of itself: speed, time and memory. No number of its training depends on any of it."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.run_folder.attempts import count_restarts, read_attempts, this_attempt
from pipeline.training.inputs import Inputs
from pipeline.training.mfu import mfu_per_token_rate, peak_flops
from pipeline.training.phases import Phases

_GIB = 2**30
MEASURED = ("tokens_per_second_per_gpu", "mfu", "seconds/", "memory_", "restarts")
"""How the names of these figures begin: equal runs differ in them and in nothing else."""


@dataclass(frozen=True)
class Instruments:
    """One rank's.

    Attributes:
        phases: how the time of this rank's main thread divides.
        mfu_per_token_rate: the MFU of one token a second on one device; None where its peak is unknown.
        restarts: how often training began again so far.
    """

    device: torch.device
    phases: Phases
    mfu_per_token_rate: float | None
    restarts: int

    def speed(self, tokens: int, seconds: float) -> dict[str, float]:
        """How fast a step of so many tokens was."""
        rate = tokens / seconds / dist.get_world_size()
        speed = {"tokens_per_second_per_gpu": rate}
        return speed if self.mfu_per_token_rate is None else speed | {"mfu": rate * self.mfu_per_token_rate}

    def readings(self) -> dict[str, float]:
        """The time since this was last asked, by phases, and the memory; on a GPU, ask when its work was waited for."""
        seconds = {f"seconds/{phase}": spent for phase, spent in self.phases.seconds().items()}
        return seconds | memory_gib(self.device) | {"restarts": self.restarts}


def instruments_of(inputs: Inputs, device: torch.device, phases: Phases) -> Instruments:
    """This rank's; only the first rank, whose figures are written, counts operations and attempts."""
    if dist.get_rank() != 0:
        return Instruments(device, phases, mfu_per_token_rate=None, restarts=0)
    peak = peak_flops(inputs.config, inputs.deepspeed_config.dtype, device)
    restarts = count_restarts(read_attempts(inputs.config.folder), this_attempt())
    return Instruments(device, phases, mfu_per_token_rate(inputs.config, inputs.base.spec, peak), restarts)


def memory_gib(device: torch.device) -> dict[str, float]:
    """The most that this process has held so far: on a GPU of its tensors and of torch's cache, else of the host."""
    if device.type == "cuda":
        return {
            "memory_peak_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB,
            "memory_peak_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
        }
    return {"memory_peak_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB}
