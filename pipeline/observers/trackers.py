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
from collections.abc import Callable
from typing import Any

from pipeline import log
from pipeline.config.reading import flattened
from pipeline.config.run import MlflowTracker, RunConfig, WandbTracker
from pipeline.errors import RunFolderError, in_one_line
from pipeline.files import read_text, write_text
from pipeline.training.observer import Observer, StepEvent

_PARAMETERS_PER_REQUEST = 100
"""MLflow takes no more."""
_FINISH_TIMEOUT_S = 60.0
"""W&B would wait for its server without end, and a job would miss its time limit."""
_logger = log.get_logger(__name__)


class Tracker(Observer):
    """A tracked run. A subclass names its `service`, logs a step in `_log` and ends the attempt in `_finish`."""

    service: str

    def __init__(self, config: RunConfig, settings: Any) -> None:  # noqa: ANN401  # the service's own
        self._id_file = config.folder / f"{self.service}_run_id"
        self._failed = False
        self._guarded(lambda: self._start(config, settings))

    def on_step(self, event: StepEvent) -> None:
        self._guarded(lambda: self._log(event))

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

    def _recorded_id(self, new: Callable[[], str]) -> tuple[str, bool]:
        """The id of the tracked run, and whether an earlier attempt has recorded it; else that of a `new` one."""
        if self._id_file.exists() and (recorded := read_text(self._id_file, RunFolderError, "move it away").strip()):
            return recorded, True
        run_id = new()
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._id_file, f"{run_id}\n")
        return run_id, False

    def _start(self, config: RunConfig, settings: Any) -> None:  # noqa: ANN401
        raise NotImplementedError

    def _log(self, event: StepEvent) -> None:
        raise NotImplementedError

    def _finish(self, *, finished: bool) -> None:
        raise NotImplementedError


class Wandb(Tracker):
    """Weights & Biases. The x axis is our `step`: W&B drops values for earlier values of its own step."""

    service = "wandb"

    def _start(self, config: RunConfig, settings: WandbTracker) -> None:
        from wandb import Settings, init, teardown

        self._teardown = teardown
        self._run = init(
            project=settings.project,
            entity=settings.entity,
            name=config.name,
            id=self._recorded_id(lambda: secrets.token_hex(4))[0],
            resume="allow" if settings.mode == "online" else None,  # offline W&B warns that it cannot
            mode=settings.mode,
            dir=str(config.folder),
            config=config.model_dump(mode="json"),
            allow_val_change=True,
            settings=Settings(console="off", silent=True, finish_timeout=_FINISH_TIMEOUT_S),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        _logger.info("wandb: logs into %s", self._run.url if settings.mode == "online" else self._run.dir)

    def _log(self, event: StepEvent) -> None:
        self._run.log({"step": event.step, **event.figures})

    def _finish(self, *, finished: bool) -> None:
        self._run.finish(exit_code=int(not finished))
        # `finish` does not wait until W&B's own process has written the last figures to the offline file.
        self._teardown(exit_code=int(not finished))


class Mlflow(Tracker):
    """MLflow: a server, or a database such as sqlite:///runs/mlflow.db (MLflow 3 refuses plain folders)."""

    service = "mlflow"

    def _start(self, config: RunConfig, settings: MlflowTracker) -> None:
        # By default MLflow retries an unreachable server for minutes, while all ranks would wait.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=settings.tracking_uri)

        def create() -> str:
            experiment = self._client.get_experiment_by_name(settings.experiment)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment)
            )
            return str(self._client.create_run(experiment_id, run_name=config.name).info.run_id)

        self._run_id, recorded = self._recorded_id(create)
        if recorded:
            self._client.update_run(self._run_id, status="RUNNING")
            return  # MLflow does not allow changes of parameters
        parameters = [Param(name, str(value)) for name, value in flattened(config.model_dump(mode="json"))]
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=parameters[start : start + _PARAMETERS_PER_REQUEST])

    def _log(self, event: StepEvent) -> None:
        now_ms = time.time_ns() // 1_000_000
        metrics = [self._metric(name, value, now_ms, event.step) for name, value in event.figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _finish(self, *, finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")


def make_trackers(config: RunConfig) -> list[Observer]:
    """The trackers that `observers` of the configuration names, for rank 0."""
    wandb, mlflow = config.observers.wandb, config.observers.mlflow
    return [*([Wandb(config, wandb)] if wandb else []), *([Mlflow(config, mlflow)] if mlflow else [])]
