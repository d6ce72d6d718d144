"""Experiment trackers: log the figures of each step to Weights & Biases or MLflow too.

A fault of a tracker ends no run: it is one error line, and the attempt continues without it. All
attempts at a run log into one tracked run, whose id is recorded in the run folder. Both services
only append: a step that is computed again is there twice, and the later value is valid.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline import log
from pipeline.config.reading import flattened
from pipeline.config.run import MlflowTracker, RunConfig, WandbTracker
from pipeline.errors import in_one_line
from pipeline.files import write_text
from pipeline.training.observer import Observer, StepEvent

_PARAMETERS_PER_REQUEST = 100
"""MLflow takes no more."""
_FINISH_TIMEOUT_S = 60.0
"""W&B would wait for its server without end, and a job would miss its time limit."""
_logger = log.get_logger(__name__)
Log = Callable[[StepEvent], None]
End = Callable[[bool], None]
"""Called with whether the run is finished."""


class Tracker(Observer):
    """A run that is tracked by `service`: `start` begins or continues it, and returns how to log a
    step and to end.
    """

    def __init__(self, service: str, start: Callable[[], tuple[Log, End]]) -> None:
        self._service, self._failed = service, False
        self._guarded(lambda: self._keep(*start()))

    def _keep(self, log_step: Log, end: End) -> None:
        self._log, self._end = log_step, end

    def on_step(self, event: StepEvent) -> None:
        self._guarded(lambda: self._log(event))

    def on_end(self, *, finished: bool) -> None:
        self._guarded(lambda: self._end(finished))

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  # no fault of a tracker may end training
            self._failed = True
            _logger.error(
                "%s: %s; this attempt continues without it", self._service, in_one_line(error)
            )


def make_trackers(config: RunConfig) -> list[Observer]:
    """The trackers that `observers` of the configuration names, for rank 0."""
    trackers: list[Observer] = []
    if (wandb := config.observers.wandb) is not None:
        trackers.append(Tracker("wandb", partial(_start_wandb, config, wandb)))
    if (mlflow := config.observers.mlflow) is not None:
        trackers.append(Tracker("mlflow", partial(_start_mlflow, config, mlflow)))
    return trackers


def _recorded_id(config: RunConfig, service: str) -> tuple[Path, str | None]:
    """The file of the tracked run's id in the run folder, and the id that an earlier attempt has
    recorded there.
    """
    path = config.folder / f"{service}_run_id"
    return path, path.read_text(encoding="utf-8").strip() if path.exists() else None


def _start_wandb(config: RunConfig, settings: WandbTracker) -> tuple[Log, End]:
    from wandb import Settings, init, teardown

    path, recorded = _recorded_id(config, "wandb")
    run = init(
        project=settings.project,
        entity=settings.entity,
        name=config.name,
        id=recorded or secrets.token_hex(4),
        resume="allow" if settings.mode == "online" else None,  # offline W&B warns that it cannot
        mode=settings.mode,
        dir=str(config.folder),
        config=config.model_dump(mode="json"),
        allow_val_change=True,
        settings=Settings(console="off", silent=True, finish_timeout=_FINISH_TIMEOUT_S),
    )
    write_text(path, f"{run.id}\n")
    # The x axis is our step: W&B drops values for earlier values of its own.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    _logger.info("wandb: logs into %s", run.url if settings.mode == "online" else run.dir)

    def end(finished: bool) -> None:
        run.finish(exit_code=int(not finished))
        # `finish` does not wait until W&B's own process has written the last figures to the
        # offline file.
        teardown(exit_code=int(not finished))

    return lambda event: run.log({"step": event.step, **event.figures}), end


def _start_mlflow(config: RunConfig, settings: MlflowTracker) -> tuple[Log, End]:
    """On a server, or in a database such as sqlite:///runs/mlflow.db (MLflow 3 refuses plain
    folders).
    """
    # By default MLflow retries an unreachable server for minutes, while all ranks would wait.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    import mlflow

    mlflow.set_tracking_uri(settings.tracking_uri)
    mlflow.set_experiment(settings.experiment)
    path, recorded = _recorded_id(config, "mlflow")
    run = mlflow.start_run(recorded, run_name=config.name)
    write_text(path, f"{run.info.run_id}\n")
    if recorded is None:  # MLflow allows no change of parameters
        parameters = list(flattened(config.model_dump(mode="json")))
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            mlflow.log_params(dict(parameters[start : start + _PARAMETERS_PER_REQUEST]))

    def end(finished: bool) -> None:
        mlflow.end_run("FINISHED" if finished else "KILLED")

    return lambda event: mlflow.log_metrics(event.figures, step=event.step), end
