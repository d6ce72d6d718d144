"""The trackers, with the real packages: figures and settings arrive, restarts continue one run,
faults end none.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import wandb
from mlflow import MlflowClient

from pipeline.checks.input_checks import check_trackers
from pipeline.checks.inputs import RunInputs
from pipeline.config.reading import flattened
from pipeline.config.run import RunConfig, load_config, parse_config
from pipeline.errors import MissingPackageError
from pipeline.observers.trackers import make_trackers
from pipeline.training.observer import StepEvent

pytestmark = pytest.mark.full

WANDB = {"wandb": {"project": "tests", "mode": "offline"}}
LOGGER = "pipeline.observers.trackers"


def mlflow_in(folder: Path) -> dict[str, Any]:
    return {"mlflow": {"tracking_uri": f"sqlite:///{folder / 'mlflow.db'}", "experiment": "tests"}}


def configured(folder: Path, observers: dict[str, Any]) -> RunConfig:
    values = load_config(Path("configs/demo.yaml")).model_dump(mode="json", exclude_none=True)
    return parse_config(values | {"folder": str(folder), "observers": observers}, source="test")


def error_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER and record.levelname == "ERROR"
    ]


def log_two_attempts(config: RunConfig) -> None:
    """Steps 0 to 3, back to 2 by a rollback, 3 again, and after a restart from step 2 steps 3 and
    4.
    """
    (tracker,) = make_trackers(config)
    for step in range(4):
        tracker.on_step(StepEvent(step, 8, 1.0, {"loss": 10.0 - step, "perplexity/korean": 2.0}))
    tracker.on_rollback(2)
    tracker.on_step(StepEvent(3, 8, 1.0, {"loss": 5.0}))
    tracker.on_end(finished=False)
    time.sleep(1)  # W&B names an offline attempt's folder by the second
    (tracker,) = make_trackers(config)
    tracker.on_step(StepEvent(3, 8, 1.0, {"loss": 4.0}))
    tracker.on_step(StepEvent(4, 8, 1.0, {"loss": 3.0}))
    tracker.on_end(finished=True)


LOSSES = [(0, 10.0), (1, 9.0), (2, 8.0), (3, 7.0), (3, 5.0), (3, 4.0), (4, 3.0)]


def wandb_records(folder: Path) -> dict[str, list[Any]]:
    """What lies in W&B's offline files of a run folder, oldest first: the ids, the settings and the
    figures.
    """
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found: dict[str, list[Any]] = defaultdict(list)
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found["ids"].append(record.run.run_id)
                found["settings"].append(
                    {item.key: json.loads(item.value_json) for item in record.run.config.update}
                )
            elif kind == "history":
                found["figures"].append(
                    {
                        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
            elif kind == "exit":
                found["exit codes"].append(record.exit.exit_code)
    return found


def test_wandb_keeps_one_run_over_a_rollback_and_a_restart(tmp_path, caplog):
    config = configured(tmp_path, WANDB)
    log_two_attempts(config)
    assert not error_lines(caplog)
    found = wandb_records(tmp_path)
    assert len(set(found["ids"])) == 1
    assert found["settings"][0]["schedule"]["steps"] == config.schedule.steps
    assert [(line["step"], line["loss"]) for line in found["figures"]] == LOSSES
    assert found["figures"][0]["perplexity/korean"] == 2.0
    assert found["exit codes"] == [1, 0]


def test_mlflow_keeps_one_run_over_a_rollback_and_a_restart(tmp_path, caplog):
    config = configured(tmp_path, mlflow_in(tmp_path))
    log_two_attempts(config)
    assert not error_lines(caplog)
    assert config.observers.mlflow is not None
    client = MlflowClient(config.observers.mlflow.tracking_uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["schedule.steps"] == str(config.schedule.steps)
    assert run.data.params.keys() == dict(flattened(config.model_dump(mode="json"))).keys()
    assert [
        (point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")
    ] == LOSSES
    assert run.data.metrics["perplexity/korean"] == 2.0


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_missing_package_is_refused_in_one_line(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    config = configured(tmp_path, WANDB if package == "wandb" else mlflow_in(tmp_path))
    with pytest.raises(
        MissingPackageError, match=rf"^observers.{package}: .*pip install 'scale-cpt\[{package}\]'"
    ):
        check_trackers(RunInputs(config, 1))


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_failing_tracker_costs_one_error_line(tmp_path, caplog, monkeypatch, service):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    nobody = {"mlflow": {"tracking_uri": "http://127.0.0.1:9"}}
    (tracker,) = make_trackers(configured(tmp_path, WANDB if service == "wandb" else nobody))
    if service == "wandb":
        wandb.run.finish()  # it now refuses what is logged
    for step in range(3):
        tracker.on_step(StepEvent(step, 8, 1.0, {"loss": 1.0}))
    tracker.on_end(finished=True)
    (line,) = error_lines(caplog)
    assert line.startswith(f"{service}: ") and "continues without it" in line and "\n" not in line


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_texts_of_prompts_arrive(service, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)  # MLflow keeps files of a database's runs in ./mlruns
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = WANDB if service == "wandb" else mlflow_in(tmp_path)
    config = parse_config(
        load_config(Path(__file__).parents[2] / "configs" / "demo.yaml").model_dump(
            mode="json", exclude_none=True
        )
        | {"folder": str(tmp_path / "run"), "observers": settings},
        source="test",
    )
    (tmp_path / "run").mkdir()
    (tracker,) = make_trackers(config)
    tracker.on_step(StepEvent(1, 8, 1.0, {"loss": 1.0}, {"prompt/1": "**옛날에** 어느"}))
    tracker.on_end(finished=True)
    assert error_lines(caplog) == []
    if service == "mlflow":
        (text,) = tmp_path.rglob("step_00000001.txt")
        assert text.read_text(encoding="utf-8") == "**옛날에** 어느"
    else:
        (table,) = (tmp_path / "run").rglob("media/table/*.json")
        assert "prompt/1" in table.read_text(encoding="utf-8")
