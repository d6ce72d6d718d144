"""The peak of a GPU's memory."""

from __future__ import annotations

import gc

import torch

_GIB = 2**30


class PeakMemory:
    """The most GPU memory that is taken from here on, beyond what is held already.

    A CPU has no such figure: a process keeps the memory that one variant gives back, and the next
    variant takes it from there, so that the process does not grow.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            # What earlier work left in reference cycles or in the allocator's cache is not ours.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()

    def gib(self) -> float | None:
        """In GiB; None on a CPU."""
        if not self._on_gpu:
            return None
        # Allocated, not reserved: what the allocator caches beyond it depends on what ran before.
        return (torch.cuda.max_memory_allocated() - self._held) / _GIB
