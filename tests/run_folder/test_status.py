"""The status of real run folders, in each state of a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.errors import (
    FINISHED,
    FOLDER_TAKEN,
    LOST_RANK,
    RESUME_LATER,
    USER_ERROR,
    DataError,
    FolderTakenError,
    RunFolderError,
)
from pipeline.run_folder.attempts import decide, record_end, record_stage, record_start, stage_of
from pipeline.run_folder.lock import RunLock
from pipeline.run_folder.status import as_text, read_status
from tests.distributed import run_ranks
from tests.hostile import PLACES
from tests.training.runs import STEPS, make_run, train

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory):
    """The folder of a run that was stopped after its first step and then finished."""
    folder = tmp_path_factory.mktemp("finished")
    config = make_run(folder, tokens, zero=1)
    assert run_ranks(_stopped, 2, config, "7.0") == [RESUME_LATER] * 2
    stopped = read_status(folder)
    assert run_ranks(_goes_on, 2, config, "7.1") == [0, 0]
    return folder, stopped


def _stopped(config, attempt):
    os.environ["ATTEMPT"] = attempt
    return train(config, stop=True)


def _goes_on(config, attempt):
    os.environ["ATTEMPT"] = attempt
    return train(config)


@pytest.mark.parametrize("kind", PLACES)
def test_any_thing_in_place_of_a_record_is_refused_in_one_line_or_skipped(tmp_path, kind):
    for name in ("metrics.jsonl", "attempts.jsonl", "training.lock"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        PLACES[kind](folder / name)
        if kind != "a folder":
            assert read_status(folder).step == 0
        else:
            with pytest.raises((RunFolderError, OSError), match=name):
                read_status(folder)


def test_a_stopped_run_waits_and_a_finished_one_is_done(finished):
    folder, stopped = finished
    assert (stopped.state, stopped.step, stopped.restarts) == ("waiting", 1, 0)
    assert stopped.seconds_left is not None and stopped.seconds_left > 0
    assert stopped.checkpoint == str(folder / "checkpoints" / "step_00000001")

    done = read_status(folder)
    assert (done.state, done.step, done.steps, done.restarts) == ("done", STEPS, STEPS, 1)
    assert done.tokens_seen == STEPS * 8 * 32
    assert done.loss is not None and 0 < done.loss < 20
    assert done.tokens_per_second is not None and done.tokens_per_second > 0
    assert done.seconds_left is None
    assert not (folder / "training.lock").exists()


def test_the_tool_prints_aligned_lines_or_json_and_loads_no_torch(finished):
    folder, _ = finished
    tool = [sys.executable, "-X", "importtime", "tools/status.py", str(folder)]
    text = subprocess.run(tool, cwd=PROJECT, capture_output=True, text=True, check=True)
    lines = text.stdout.splitlines()
    assert lines[1] == "state       done: all steps are done"
    assert len({line.index(line.split(None, 1)[1]) for line in lines}) == 1
    modules = {line.rpartition("|")[2].strip() for line in text.stderr.splitlines()}
    assert "pydantic" in modules and "torch" not in modules
    as_json = subprocess.run([*tool, "--json"], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert json.loads(as_json.stdout)["state"] == "done"


def test_each_started_run_of_a_study_has_a_line(finished, tmp_path):
    (tmp_path / "a.seed_1").symlink_to(finished[0])
    (tmp_path / "b.seed_1").mkdir()
    record_end(tmp_path / "b.seed_1", exit_code=USER_ERROR, error="no text")
    (tmp_path / "tokens").mkdir()
    tool = [sys.executable, "tools/status.py", str(tmp_path)]
    text = subprocess.run(tool, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert text.splitlines() == [
        f"a.seed_1  done    {STEPS} of {STEPS}  all steps are done",
        "b.seed_1  failed          train: no text",
    ]
    as_json = subprocess.run([*tool, "--json"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert [run["state"] for run in json.loads(as_json)] == ["done", "failed"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder in which an attempt begins."""
    monkeypatch.setenv("ATTEMPT", "7.0")
    config = load_config(PROJECT / "configs" / "demo.yaml").model_copy(update={"folder": tmp_path})
    record_start(config, 2, 0)
    return tmp_path


def test_a_run_whose_lock_is_held_is_running(run):
    with RunLock(run):
        status = read_status(run)
        assert status.state == "running"
        assert f"pid {os.getpid()}" in status.why
    assert read_status(run).state != "running"


def test_a_run_to_be_retried_waits_and_has_its_fault(run):
    record_end(run, exit_code=LOST_RANK, step=3, error="rank 1 on n2 was lost")
    assert read_status(run).state == "failed", "no retry was recorded"
    decide(run, stage="train", exit_code=137, without_progress=3, most=100)
    status = read_status(run)
    assert (status.state, status.restarts) == ("waiting", 0)
    assert status.why == "train: rank 1 on n2 was lost (restart 1, 1 of at most 3 without progress)"


def test_a_run_without_a_retry_has_failed_with_a_reason(run):
    decide(run, stage="convert", exit_code=137, without_progress=0, most=100)
    status = read_status(run)
    assert status.state == "failed"
    assert status.why.startswith("convert: exit code 137 (1 attempt(s) in a row brought no newer checkpoint")


def test_an_attempt_without_a_recorded_end_failed(run):
    assert read_status(run).why.startswith("the last attempt left no reason")


@pytest.fixture
def squeue(tmp_path_factory, monkeypatch):
    """Sets the state that Slurm reports for job 7."""
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def set_state(state: str) -> None:
        (folder / "squeue").write_text(f"#!/bin/sh\necho {state}\n", encoding="utf-8")
        (folder / "squeue").chmod(0o755)

    return set_state


def save(run: Path, step: int) -> None:
    """The minimum of a complete checkpoint."""
    (run / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (run / "checkpoints" / f"step_{step:08d}" / "manifest.json").touch()


def test_a_refused_job_does_not_change_the_status(run, monkeypatch):
    monkeypatch.setenv("ATTEMPT", "8.0")
    record_stage(run, "tokenize")
    record_end(run, stage="tokenize", exit_code=FINISHED)
    assert not decide(run, stage="train", exit_code=FOLDER_TAKEN, without_progress=3, most=100).again
    assert read_status(run).why.startswith("the last attempt left no reason")
    monkeypatch.setenv("ATTEMPT", "7.0")
    record_end(run, exit_code=RESUME_LATER, step=3)
    status = read_status(run)
    assert (status.state, status.why, status.restarts) == ("waiting", "saved, resumes later", 0)
    assert not decide(run, stage="train", exit_code=RESUME_LATER, without_progress=3, most=0).again
    status = read_status(run)
    assert status.state == "failed" and status.why.startswith("train: saved, and given up (")


def test_the_newest_line_decides_whichever_attempt_started_first(run, monkeypatch):
    monkeypatch.setenv("ATTEMPT", "8.0")
    decide(run, stage="train", exit_code=USER_ERROR, without_progress=3, most=100)
    assert read_status(run).state == "failed"
    monkeypatch.setenv("ATTEMPT", "7.0")
    record_end(run, exit_code=RESUME_LATER, step=3)
    assert read_status(run).state == "waiting"


@pytest.mark.parametrize("code", [RESUME_LATER, LOST_RANK])
def test_a_job_that_waits_is_queued_or_the_run_has_stopped(run, squeue, code):
    if code == RESUME_LATER:
        record_end(run, exit_code=code, step=3)
    else:
        decide(run, stage="train", exit_code=code, without_progress=3, most=100)
    squeue("PENDING")
    waiting = read_status(run)
    assert waiting.state == "waiting" and "about two minutes" in waiting.why
    squeue("")
    stopped = read_status(run)
    assert stopped.state == "stopped" and "job 7 is no longer queued" in stopped.why


def test_a_failed_attempt_after_the_end_is_superseded_by_one_with_nothing_to_train(finished, monkeypatch):
    folder, _ = finished
    monkeypatch.setenv("ATTEMPT", "8.0")
    decide(folder, stage="train", exit_code=137, without_progress=3, most=100)
    failed = read_status(folder)
    assert (failed.state, failed.seconds_left) == ("waiting", None)
    assert run_ranks(_goes_on, 2, folder / "run.yaml", "8.1") == [0, 0]
    done = read_status(folder)
    assert (done.state, done.restarts) == ("done", 1)


def test_the_forecast_counts_from_the_newest_checkpoint(run):
    schedule = load_config(PROJECT / "configs" / "demo.yaml").schedule
    save(run, 20)
    steps = [{"step": step, "tokens_per_second_per_gpu": 1000.0} for step in range(1, 29)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps), encoding="utf-8")

    def steps_left() -> int:
        status = read_status(run)
        assert status.step == 28 and status.steps and status.seconds_left and status.tokens_seen
        return round(status.seconds_left * 2 * 1000.0 / (status.tokens_seen / status.step))

    with RunLock(run):
        assert steps_left() == schedule.steps - 28, "28 steps are done, as long as nobody ends it"
    record_end(run, exit_code=RESUME_LATER, step=28)
    assert steps_left() == schedule.steps - 20


@pytest.fixture
def described(tmp_path, monkeypatch):
    """The configuration of a run that a script is about to begin, with its folder."""
    monkeypatch.setenv("ATTEMPT", "7.0")
    text = (PROJECT / "configs" / "demo.yaml").read_text(encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(re.sub("(?m)^folder: .*", f"folder: {tmp_path / 'run'}", text), encoding="utf-8")
    return load_config(path), tmp_path / "run"


def test_a_serial_stage_is_recorded_while_it_runs_and_after(described):
    config, folder = described
    with stage_of(config, "tokenize"):
        status = read_status(folder)
        assert status.state == "running"
        assert status.why.startswith("tokenize: ") and f"pid {os.getpid()}" in status.why
    assert (read_status(folder).state, read_status(folder).why) == (
        "waiting",
        "tokenize is done, the next stage follows",
    )


def test_a_failed_serial_stage_has_a_reason(described):
    config, folder = described
    with pytest.raises(DataError), stage_of(config, "tokenize"):
        raise DataError("corpus.jsonl: no such file")
    decide(folder, stage="tokenize", exit_code=USER_ERROR, without_progress=3, most=100)
    status = read_status(folder)
    assert (status.state, status.restarts) == ("failed", 0)
    assert status.why == "tokenize: corpus.jsonl: no such file (its cause must be fixed first)"


def test_a_stage_that_the_user_interrupted_has_stopped(described):
    config, folder = described
    with stage_of(config, "train"):
        (folder / "training.json").touch()
    with pytest.raises(KeyboardInterrupt), stage_of(config, "evaluate"):
        raise KeyboardInterrupt
    status = read_status(folder)
    assert status.state == "stopped"
    assert status.why == "evaluate: interrupted by the user (all steps are trained); the same command resumes"


def test_a_serial_stage_by_hand_is_no_attempt(described, monkeypatch):
    config, folder = described
    monkeypatch.delenv("ATTEMPT")
    with stage_of(config, "evaluate"):
        pass
    assert not (folder / "attempts.jsonl").exists()


def test_a_stage_that_takes_one_process_refuses_the_second(described):
    config, folder = described
    with stage_of(config, "convert", alone=True):
        with pytest.raises(FolderTakenError, match="is at the stage convert"), stage_of(config, "convert", alone=True):
            pass
        with stage_of(config, "upscale", alone=True):
            assert (folder / "upscale.lock").exists()
    assert not list(folder.glob("*.lock"))


def test_a_trained_run_is_not_done_while_a_stage_works(run):
    config = load_config(PROJECT / "configs" / "demo.yaml")
    save(run, config.schedule.steps)
    (run / "training.json").touch()
    record_end(run, exit_code=FINISHED, step=config.schedule.steps)
    assert read_status(run).state == "done"
    record_stage(run, "convert")
    status = read_status(run)
    assert status.state == "running"
    assert status.why.startswith("convert: ") and status.why.endswith(" (all steps are trained)")
    assert status.seconds_left is None


def test_between_two_stages_the_job_is_running(run, squeue):
    record_stage(run, "upscale")
    record_end(run, stage="upscale", exit_code=FINISHED)
    squeue("RUNNING")
    assert (read_status(run).state, read_status(run).why) == ("running", "job 7 continues after upscale")


def test_a_folder_without_attempts_has_not_started(tmp_path):
    status = read_status(tmp_path)
    assert (status.state, status.step, status.checkpoint) == ("not started", 0, None)
    assert "none yet" in as_text(status)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="no such run folder"):
        read_status(tmp_path / "nowhere")
