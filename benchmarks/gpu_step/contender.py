"""A variant that takes turns with the others: what its steps took, or why it could not."""

from __future__ import annotations

import importlib.util

import torch

from benchmarks.gpu_step.models import LIGER_PACKAGES
from benchmarks.gpu_step.peak_memory import PeakMemory
from benchmarks.gpu_step.shapes import Shape
from benchmarks.gpu_step.training_step import TrainingStep
from benchmarks.gpu_step.variants import Variant
from benchmarks.results import Elapsed


class Contender:
    """A variant, and what its turns showed.

    Between turns it holds no memory, but keeps what was compiled. One that has a `fault`, such as
    too little memory, gets no more turns.

    Attributes:
        steps: the time of each measured step of all turns.
        peak_gib: the largest peak of GPU memory of a turn; None on a CPU.
        fault: why it cannot be measured; empty if it can.
    """

    def __init__(
        self, variant: Variant, shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.variant = variant
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.steps: list[Elapsed] = []
        self.trained_parameters = 0
        self.peak_gib: float | None = None
        self.fault = _missing_packages(variant)
        self._step: TrainingStep | None = None

    def turn(self, steps: int) -> None:
        """Measures `steps` steps, after one that is not measured."""
        peak = PeakMemory(self.device)
        try:
            self._run(steps)
        except torch.OutOfMemoryError:
            self.fault = "out of memory"
            # With its model: the variants that follow need the memory.
            self._step = None
        taken = peak.gib()
        if taken is not None:
            self.peak_gib = max(taken, self.peak_gib or 0.0)

    def _run(self, steps: int) -> None:
        if self._step is None:
            self._step = TrainingStep(self.variant, self.shape, self.device, self.dtype)
            self.trained_parameters = self._step.trained_parameters
        self._step.allocate()
        # The first step compiles, chooses kernels, and allocates the optimizer's state.
        self._step.run()
        for _ in range(steps):
            self.steps.append(self._step.run())
        self._step.release()


def _missing_packages(variant: Variant) -> str:
    """What the variant needs and is not installed, as the table says it; empty if nothing."""
    if not variant.liger:
        return ""
    missing: list[str] = []
    for name in LIGER_PACKAGES:
        if importlib.util.find_spec(name) is None:
            missing.append(name)
    return f"needs {', '.join(missing)}" if missing else ""
