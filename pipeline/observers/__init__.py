"""What watches a run. Each observer hears the training loop's events (`pipeline.training.observer`)."""

from __future__ import annotations

from pipeline.observers.diagnostics import make_diagnostics
from pipeline.observers.forgetting import ForgettingBudget
from pipeline.observers.metrics import MetricsFiles
from pipeline.observers.performance import Profiler, make_performance_metrics
from pipeline.observers.progress import Progress
from pipeline.training.observer import Observer, RunContext


def make_observers(context: RunContext) -> list[Observer]:
    """The observers that the run's configuration asks for: those that measure first, then those that write."""
    config, position = context.inputs.config, context.position
    observers: list[Observer] = [
        Profiler(config.profile, config.folder, context.rank, context.device),
        make_diagnostics(context),
        ForgettingBudget(config),
        make_performance_metrics(context),
    ]
    if context.rank == 0:
        observers.append(MetricsFiles(config.folder, position.step))
        observers.append(Progress(position.step, config.schedule.steps, config.metrics.log_every_s))
    return observers
