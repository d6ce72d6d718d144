"""The observers of a run, which receive the events of `pipeline.training.observer`."""

from __future__ import annotations

from pipeline.extension import extensions
from pipeline.observers.drift import Drift
from pipeline.observers.early_stop import EarlyStop
from pipeline.observers.heldout_lines import HeldoutLines
from pipeline.observers.limits import ForgettingBudget
from pipeline.observers.metrics import MetricsFiles, ProgressDisplay
from pipeline.observers.performance import PerformanceMetrics, Profiler
from pipeline.observers.prompts import PromptTexts
from pipeline.observers.trackers import make_trackers
from pipeline.training.observer import Observer
from pipeline.training.trainer import Trainer


def make_observers(trainer: Trainer) -> list[Observer]:
    """The observers of the run's configuration; every rank must call it.

    Those that measure come first: the others write what they have measured.
    """
    config = trainer.config
    step = trainer.position.step
    observers: list[Observer] = [
        Drift(trainer),
        ForgettingBudget(config),
        EarlyStop(config),
    ]
    # After the early stop, which decides what the last validation is.
    for extension in extensions():
        observers += extension.observers(trainer)
    # After what takes time: their clocks and texts are of the whole step.
    observers += [PromptTexts(trainer), PerformanceMetrics(trainer), Profiler(trainer)]
    if trainer.rank == 0:
        observers.append(HeldoutLines(config))
        observers.append(MetricsFiles(config.folder, step, trainer.stages))
        observers.append(ProgressDisplay(step, config.schedule.steps, config.metrics.log_every_s))
        observers += make_trackers(config)
    return observers
