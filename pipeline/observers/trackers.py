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
from typing import Any

from pipeline import log
from pipeline.config.observers import MlflowTracker, WandbTracker
from pipeline.config.reading import flattened
from pipeline.config.run import RunConfig
from pipeline.errors import in_one_line
from pipeline.files.publishing import write_text
from pipeline.training.observer import Observer, StepEvent

_PARAMETERS_PER_REQUEST = 100
"""How many parameters MLflow takes in one request."""
_FINISH_TIMEOUT_S = 60.0
"""How long W&B may wait for its server at the end.

Otherwise it would wait without end, and a job would miss its time limit.
"""
_logger = log.get_logger(__name__)
Log = Callable[[StepEvent], None]
End = Callable[[bool], None]
"""Called with whether the run is finished."""


class Tracker(Observer):
    """A run that is tracked by `service`."""

    def __init__(self, service: str, start: Callable[[], tuple[Log, End]]) -> None:
        """`start` begins or continues the tracked run; it returns how to log a step and to end."""
        self._service = service
        self._failed = False
        self._guarded(lambda: self._start(start))

    def _start(self, start: Callable[[], tuple[Log, End]]) -> None:
        self._log, self._end = start()

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
    wandb = config.observers.wandb
    if wandb is not None:
        trackers.append(Tracker("wandb", partial(_start_wandb, config, wandb)))
    mlflow = config.observers.mlflow
    if mlflow is not None:
        trackers.append(Tracker("mlflow", partial(_start_mlflow, config, mlflow)))
    return trackers


def _id_file(config: RunConfig, service: str) -> Path:
    """The file, in the run folder, with the id of the tracked run."""
    return config.folder / f"{service}_run_id"


def _recorded_id(path: Path) -> str | None:
    """The id that an earlier attempt has recorded."""
    if not path.exists():
        return None
    return path.read_text(encoding="utf-8").strip()


def _start_wandb(config: RunConfig, settings: WandbTracker) -> tuple[Log, End]:
    from wandb import Settings, Table, init, teardown

    path = _id_file(config, "wandb")
    is_online = settings.mode == "online"
    run = init(
        project=settings.project,
        entity=settings.entity,
        name=config.name,
        id=_recorded_id(path) or secrets.token_hex(4),
        resume="allow" if is_online else None,  # offline W&B would warn that it cannot
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
    _logger.info("wandb: logs into %s", run.url if is_online else run.dir)

    def log_step(event: StepEvent) -> None:
        values: dict[str, Any] = {"step": event.step, **event.figures}
        if event.texts:
            values["prompts"] = Table(columns=["prompt", "text"], data=list(event.texts.items()))
        run.log(values)

    def end(finished: bool) -> None:
        run.finish(exit_code=int(not finished))
        # `finish` does not wait until W&B's own process has written the last figures to the
        # offline file.
        teardown(exit_code=int(not finished))

    return log_step, end


def _start_mlflow(config: RunConfig, settings: MlflowTracker) -> tuple[Log, End]:
    """Logs to a server, or into a database such as sqlite:///runs/mlflow.db.

    MLflow 3 refuses plain folders.
    """
    # By default MLflow retries an unreachable server for minutes, while all ranks would wait.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    import mlflow

    mlflow.set_tracking_uri(settings.tracking_uri)
    mlflow.set_experiment(settings.experiment)
    path = _id_file(config, "mlflow")
    recorded = _recorded_id(path)
    run = mlflow.start_run(recorded, run_name=config.name)
    write_text(path, f"{run.info.run_id}\n")
    if recorded is None:  # MLflow allows no change of parameters
        parameters = list(flattened(config.model_dump(mode="json")))
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            mlflow.log_params(dict(parameters[start : start + _PARAMETERS_PER_REQUEST]))

    def log_step(event: StepEvent) -> None:
        mlflow.log_metrics(event.figures, step=event.step)
        for name, text in event.texts.items():
            mlflow.log_text(text, f"{name}/step_{event.step:08d}.txt")

    def end(finished: bool) -> None:
        mlflow.end_run("FINISHED" if finished else "KILLED")

    return log_step, end
