"""Experiment trackers: log the figures of each step to Weights & Biases or MLflow too.

A tracker must not end a run: a missing package is refused before anything is loaded, any later fault is one error line,
and the attempt continues without the tracker. `metrics.jsonl` always has every figure.

All attempts at a run log into the same tracked run, whose id is recorded in the run folder. Both services only append:
a step that is computed again, after a rollback or a restart, is there twice, and the later value is valid.
"""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline import log
from pipeline.config.run import MlflowTracker, RunConfig, WandbTracker
from pipeline.errors import RunFolderError, in_one_line
from pipeline.files import read_text, write_text
from pipeline.training.observer import Observer, StepEvent

# MLflow takes no more.
_PARAMETERS_PER_REQUEST = 100
_LONGEST_PARAMETER = 6000
# W&B would wait for its server without end, and a job would miss its time limit.
_FINISH_TIMEOUT_S = 60.0
_logger = log.get_logger(__name__)


class Tracker(Observer, ABC):
    """A tracked run. `service` is for messages and names the file with the tracked run's id."""

    service: str

    def __init__(self, config: RunConfig) -> None:
        self._id_file = config.folder / f"{self.service}_run_id"
        self._failed = False
        self._guarded(lambda: self._start(config))

    def on_step(self, event: StepEvent) -> None:
        self._guarded(lambda: self._log(event.step, event.figures))

    def on_end(self, *, finished: bool) -> None:
        self._guarded(lambda: self._finish(finished=finished))

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  # no fault of a tracker may end training
            self._failed = True
            _logger.error("%s: %s; this attempt continues without it", self.service, in_one_line(error))

    def _recorded_id(self) -> str | None:
        try:
            return read_text(self._id_file, RunFolderError, "move it away").strip() or None
        except FileNotFoundError:
            return None

    def _record_id(self, run_id: str) -> str:
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._id_file, f"{run_id}\n")
        return run_id

    @abstractmethod
    def _start(self, config: RunConfig) -> None: ...

    @abstractmethod
    def _log(self, step: int, figures: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _finish(self, *, finished: bool) -> None: ...


class Wandb(Tracker):
    """Weights & Biases. The x axis is our `step`: W&B drops values for earlier values of its own step."""

    service = "wandb"

    def __init__(self, config: RunConfig, settings: WandbTracker) -> None:
        self._settings = settings
        super().__init__(config)

    def _start(self, config: RunConfig) -> None:
        from wandb import Settings, init, teardown

        self._teardown = teardown
        self._run = init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=config.name,
            id=self._recorded_id() or self._record_id(secrets.token_hex(4)),
            resume="allow" if self._settings.mode == "online" else None,  # offline W&B warns that it cannot
            mode=self._settings.mode,
            dir=str(config.folder),
            config=config.model_dump(mode="json"),
            allow_val_change=True,
            settings=Settings(console="off", silent=True, finish_timeout=_FINISH_TIMEOUT_S),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        _logger.info("wandb: logs into %s", self._run.url if self._settings.mode == "online" else self._run.dir)

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def _finish(self, *, finished: bool) -> None:
        exit_code = 0 if finished else 1
        self._run.finish(exit_code=exit_code)
        # `finish` does not wait until W&B's own process has written the last figures to the offline file.
        self._teardown(exit_code=exit_code)


class Mlflow(Tracker):
    """MLflow: a server, or a database such as sqlite:///runs/mlflow.db (MLflow 3 refuses plain folders)."""

    service = "mlflow"

    def __init__(self, config: RunConfig, settings: MlflowTracker) -> None:
        self._settings = settings
        super().__init__(config)

    def _start(self, config: RunConfig) -> None:
        # By default MLflow retries an unreachable server for minutes, while all ranks would wait.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=self._settings.tracking_uri)
        if (recorded := self._recorded_id()) is not None:
            self._run_id = recorded
            self._client.update_run(recorded, status="RUNNING")
            return  # MLflow does not allow changes of parameters
        experiment = self._client.get_experiment_by_name(self._settings.experiment)
        experiment_id = experiment.experiment_id if experiment else None
        run = self._client.create_run(
            experiment_id or self._client.create_experiment(self._settings.experiment), run_name=config.name
        )
        self._run_id = self._record_id(run.info.run_id)
        leaves = flattened(config.model_dump(mode="json"))
        parameters = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in leaves]
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=parameters[start : start + _PARAMETERS_PER_REQUEST])

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        metrics = [self._metric(name, value, now_ms, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _finish(self, *, finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")


def make_trackers(config: RunConfig) -> list[Observer]:
    """The trackers that `observers` of the configuration names, for rank 0.

    `pipeline.checks.inputs.check_trackers` has found their packages installed.
    """
    trackers: list[Observer] = []
    if config.observers.wandb is not None:
        trackers.append(Wandb(config, config.observers.wandb))
    if config.observers.mlflow is not None:
        trackers.append(Mlflow(config, config.observers.mlflow))
    return trackers


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested `values`, by dotted path."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
