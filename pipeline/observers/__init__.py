"""The observers of a run, which receive the events of the training loop
(`pipeline.training.observer`).
"""

from __future__ import annotations

from pipeline.observers.drift import Drift
from pipeline.observers.limits import ForgettingBudget
from pipeline.observers.metrics import MetricsFiles, ProgressDisplay
from pipeline.observers.performance import PerformanceMetrics, Profiler
from pipeline.observers.trackers import make_trackers
from pipeline.parallel.ranks import run_on_all_ranks
from pipeline.training.observer import Observer
from pipeline.training.trainer import Trainer


def make_observers(trainer: Trainer) -> list[Observer]:
    """The observers of the run's configuration, those that measure first; every rank must call
    it.
    """
    config, position = trainer.config, trainer.position
    observers: list[Observer] = [
        Drift(trainer),
        ForgettingBudget(config),
        PerformanceMetrics(trainer),
        Profiler(trainer),
    ]
    if trainer.rank == 0:
        observers.append(MetricsFiles(config.folder, position.step))
        observers.append(
            ProgressDisplay(position.step, config.schedule.steps, config.metrics.log_every_s)
        )
    return observers + run_on_all_ranks(lambda: make_trackers(config) if trainer.rank == 0 else [])
