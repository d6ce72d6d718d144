"""The performance of a run: speed, memory, time by phase, and traces."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile, tensorboard_trace_handler

from pipeline import log
from pipeline.run_folder.attempts import count_restarts, read_attempts, this_attempt
from pipeline.sizing.flops import mfu_per_token_rate, peak_flops
from pipeline.training.observer import Observer, StepEvent
from pipeline.training.trainer import Trainer

PROFILE = "profile"
"""The folder of the traces, in the run folder."""
MEASURED = ("tokens_per_second_per_gpu", "mfu", "seconds/", "memory_", "restarts")
"""Prefixes of measured figures, the only ones in which identical runs differ."""
_GIB = 2**30
_logger = log.get_logger(__name__)


class PerformanceMetrics(Observer):
    """Adds speed, time, memory and the number of restarts to the figures of every step."""

    def __init__(self, trainer: Trainer) -> None:
        self.device, self.phases = trainer.device, trainer.phases
        self.mfu_per_token_rate, self.restarts = None, 0
        if trainer.rank == 0:  # whose figures are written
            inputs = trainer.inputs
            peak = peak_flops(inputs.config, inputs.deepspeed_config.dtype, trainer.device)
            self.mfu_per_token_rate = mfu_per_token_rate(inputs.config, inputs.base.spec, peak)
            self.restarts = count_restarts(read_attempts(inputs.config.folder), this_attempt())

    def on_step(self, event: StepEvent) -> None:
        if event.seconds is not None:
            rate = event.tokens / event.seconds / dist.get_world_size()
            event.figures["tokens_per_second_per_gpu"] = rate
            if self.mfu_per_token_rate is not None:
                event.figures["mfu"] = rate * self.mfu_per_token_rate
        # Since the previous step. The GPU has finished its work, because the loss was read.
        event.figures.update({f"seconds/{phase}": spent for phase, spent in self.phases.seconds().items()})
        if self.device.type == "cuda":
            event.figures["memory_peak_allocated_gib"] = torch.cuda.max_memory_allocated(self.device) / _GIB
            event.figures["memory_peak_reserved_gib"] = torch.cuda.max_memory_reserved(self.device) / _GIB
        else:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            event.figures["memory_peak_resident_gib"] = peak_kib * 1024 / _GIB
        event.figures["restarts"] = self.restarts


class Profiler(Observer):
    """Traces the configured steps with torch.profiler, on the configured ranks, each as a span `ProfilerStep#<step>`.

    A step begins where the one before it is reported, and so includes that one's save.
    """

    def __init__(self, trainer: Trainer) -> None:
        settings = trainer.config.profile
        first, last = settings.steps or (1, 0)
        self._steps = range(first, last + 1) if trainer.rank in settings.ranks else range(0)
        self._folder = trainer.config.folder / PROFILE
        self._rank, self._on_gpu = trainer.rank, trainer.device.type == "cuda"
        self._profile: profile | None = None
        if settings.steps is not None:
            ranks = ", ".join(map(str, settings.ranks))
            _logger.info("traces steps %d to %d of rank(s) %s into %s", first, last, ranks, self._folder)
        if trainer.position.step > 0:  # a new run reports its step 0
            self._begin(trainer.position.step + 1)

    def on_step(self, event: StepEvent) -> None:
        self._begin(event.step + 1)

    def on_rollback(self, step: int) -> None:
        self._stop()
        self._begin(step + 1)

    def on_end(self, *, finished: bool) -> None:
        self._stop()

    def _begin(self, step: int) -> None:
        if step not in self._steps:
            self._stop()
        elif self._profile is not None:
            self._profile.step()
        else:
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
                schedule=lambda _: ProfilerAction.RECORD,  # without one, torch names no steps
                on_trace_ready=tensorboard_trace_handler(
                    str(self._folder), f"step_{step:08d}.rank_{self._rank:05d}", use_gzip=True
                ),
            )
            self._profile.step_num = step
            self._profile.start()

    def _stop(self) -> None:
        if self._profile is None:
            return
        try:
            self._profile.stop()
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            _logger.error("%s: this trace could not be written: %s", self._folder, error)
        self._profile = None
