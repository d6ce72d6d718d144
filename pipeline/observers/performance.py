"""The performance of a run: speed, memory, time by phase, and traces."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

from pipeline import log
from pipeline.config.run import Profile
from pipeline.health.liveness import Phases
from pipeline.run_folder.attempts import count_restarts, read_attempts, this_attempt
from pipeline.sizing.flops import mfu_per_token_rate, peak_flops
from pipeline.training.observer import Observer, RunContext, StepEvent

PROFILE = "profile"
"""The folder of the traces, in the run folder."""
MEASURED = ("tokens_per_second_per_gpu", "mfu", "seconds/", "memory_", "restarts")
"""Prefixes of measured figures, the only ones in which identical runs differ."""
_GIB = 2**30
_logger = log.get_logger(__name__)


class PerformanceMetrics(Observer):
    """Adds speed, time and memory to the figures of every step.

    Attributes:
        phases: of this rank's main thread.
        mfu_per_token_rate: the MFU at one token per second and device; None if the peak is unknown.
        restarts: how often training restarted so far.
    """

    def __init__(self, device: torch.device, phases: Phases, mfu_per_token_rate: float | None, restarts: int) -> None:
        self.device = device
        self.phases = phases
        self.mfu_per_token_rate = mfu_per_token_rate
        self.restarts = restarts

    def on_step(self, event: StepEvent) -> None:
        if event.seconds is not None:
            rate = event.tokens / event.seconds / dist.get_world_size()
            event.figures["tokens_per_second_per_gpu"] = rate
            if self.mfu_per_token_rate is not None:
                event.figures["mfu"] = rate * self.mfu_per_token_rate
        # Since the previous step. The GPU has finished its work, because the loss was read.
        event.figures.update({f"seconds/{phase}": spent for phase, spent in self.phases.seconds().items()})
        event.figures.update(peak_memory_gib(self.device))
        event.figures["restarts"] = self.restarts


def make_performance_metrics(context: RunContext) -> PerformanceMetrics:
    """The metrics of this rank; only rank 0, whose figures are written, counts operations and attempts."""
    if context.rank != 0:
        return PerformanceMetrics(context.device, context.phases, mfu_per_token_rate=None, restarts=0)
    inputs = context.inputs
    peak = peak_flops(inputs.config, inputs.deepspeed_config.dtype, context.device)
    mfu = mfu_per_token_rate(inputs.config, inputs.base.spec, peak)
    restarts = count_restarts(read_attempts(inputs.config.folder), this_attempt())
    return PerformanceMetrics(context.device, context.phases, mfu, restarts)


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """The peak memory of this process: on a GPU of its tensors and of torch's cache, else of the host."""
    if device.type == "cuda":
        return {
            "memory_peak_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB,
            "memory_peak_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
        }
    return {"memory_peak_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB}


class Profiler(Observer):
    """Traces the configured steps with torch.profiler, on the configured ranks.

    The trace opens in TensorBoard, Perfetto and chrome://tracing.
    """

    def __init__(self, settings: Profile, folder: Path, rank: int, device: torch.device) -> None:
        first, last = settings.steps or (1, 0)
        self._steps = range(first, last + 1) if rank in settings.ranks else range(0)
        self._folder = folder / PROFILE
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None
        self._step: record_function | None = None
        if settings.steps is not None:
            ranks = ", ".join(map(str, settings.ranks))
            _logger.info("traces steps %d to %d of rank(s) %s into %s", first, last, ranks, self._folder)

    def on_step_begin(self, step: int) -> None:
        if step not in self._steps:
            self._stop()  # also after a rollback to before these steps
            return
        if self._profile is None:
            worker = f"step_{step:08d}.rank_{self._rank:05d}"
            write = tensorboard_trace_handler(str(self._folder), worker, use_gzip=True)
            self._profile = profile(activities=self._activities, on_trace_ready=write)
            self._profile.start()
        self._step = record_function(f"step {step}")
        self._step.__enter__()

    def on_step_computed(self, step: int) -> None:
        self._end_step()

    def on_step(self, event: StepEvent) -> None:
        if self._profile is not None and event.step == self._steps[-1]:
            self._stop()

    def on_end(self, *, finished: bool) -> None:
        self._end_step()
        self._stop()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _stop(self) -> None:
        if self._profile is None:
            return
        try:
            self._profile.stop()
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            _logger.error("%s: this trace could not be written: %s", self._folder, error)
        self._profile = None
