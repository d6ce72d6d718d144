"""The performance of a run: speed, memory, time by phase, and traces."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, profile, tensorboard_trace_handler

from pipeline import log
from pipeline.sizing.mfu import mfu_per_token_rate, peak_flops
from pipeline.training.observer import Observer, StepEvent
from pipeline.training.trainer import Trainer

PROFILE = "profile"
"""The folder of the traces, in the run folder."""
_GIB = 2**30
_logger = log.get_logger(__name__)


class PerformanceMetrics(Observer):
    """Adds speed, time and memory to the figures of every step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.device = trainer.device
        self.phases = trainer.phases
        self._mfu_per_token_rate = cache(self._count_of_stage)
        # At the start, where the counting of the first stage belongs, and not at a step.
        self._mfu_per_token_rate(trainer.stage.number)

    def _count_of_stage(self, number: int) -> float | None:
        """The MFU of a token per second in a stage of the run."""
        trainer = self.trainer
        if trainer.rank != 0:  # rank 0's figures are those that are written
            return None
        inputs = trainer.inputs
        config = trainer.stages[number].config
        peak = peak_flops(config, inputs.deepspeed_config.dtype, trainer.device)
        return mfu_per_token_rate(config, inputs.base.spec, peak)

    def on_step(self, event: StepEvent) -> None:
        if event.seconds is not None:
            # Of training alone: validations and saves are not in the seconds of a step.
            rate = event.tokens / event.seconds / dist.get_world_size()
            event.figures["tokens_per_second_per_gpu"] = rate
            of_token = self._mfu_per_token_rate(self.trainer.stage.number)
            if of_token is not None:
                event.figures["mfu"] = rate * of_token
        # Since the previous step. The GPU has finished its work, because the loss was read.
        for phase, seconds in self.phases.seconds().items():
            event.figures[f"seconds/{phase}"] = seconds
        if self.device.type == "cuda":
            # Both: what tensors took, and what torch holds of the GPU, which decides whether it
            # runs out.
            allocated = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            event.figures["memory_peak_allocated_gib"] = allocated / _GIB
            event.figures["memory_peak_reserved_gib"] = reserved / _GIB
        else:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            event.figures["memory_peak_resident_gib"] = peak_kib * 1024 / _GIB


class Profiler(Observer):
    """Traces the configured steps with torch.profiler, on the configured ranks.

    Each step is a span `ProfilerStep#<step>`. It begins where the one before it is reported, and so
    includes that one's save.
    """

    def __init__(self, trainer: Trainer) -> None:
        settings = trainer.config.profile
        self._folder = trainer.config.folder / PROFILE
        self._profile: profile | None = None
        if settings.steps is None or trainer.rank not in settings.ranks:
            return
        first, last = settings.steps
        _logger.info("traces steps %d to %d into %s", first, last, self._folder)

        def action_at(step: int) -> ProfilerAction:
            if step == last:
                return ProfilerAction.RECORD_AND_SAVE
            if first <= step < last:
                return ProfilerAction.RECORD
            return ProfilerAction.NONE

        self._profile = profile(
            schedule=action_at,
            on_trace_ready=tensorboard_trace_handler(
                str(self._folder), f"rank_{trainer.rank:05d}", use_gzip=True
            ),
        )
        self._profile.start()
        if trainer.position.step > 0:  # a new run reports its step 0 itself
            self._finish_step(trainer.position.step)

    def on_step(self, event: StepEvent) -> None:
        self._finish_step(event.step)

    def on_rollback(self, step: int) -> None:
        self._finish_step(step)

    def _finish_step(self, step: int) -> None:
        if self._profile is not None:
            self._profile.step_num = step
            self._guarded(self._profile.step)

    def on_end(self, *, finished: bool) -> None:
        if self._profile is not None:
            self._guarded(self._profile.stop)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            _logger.error("%s: this trace could not be written: %s", self._folder, error)
            self._profile = None
