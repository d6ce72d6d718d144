"""The status of run folders, in each state of a run."""

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
    FOLDER_TAKEN,
    LOST_RANK,
    RESUME_LATER,
    USER_ERROR,
    CheckpointError,
    DataError,
    FolderTakenError,
    RunFolderError,
)
from pipeline.gating.folder import open_record
from pipeline.run_folder.attempts import record_end, record_start, record_training
from pipeline.run_folder.lock import RunLock
from pipeline.run_folder.metrics import readable
from pipeline.run_folder.retry import decide_retry
from pipeline.run_folder.serial_stage import serial_stage
from pipeline.run_folder.slurm_job import slurm_job
from pipeline.run_folder.status import TRAINING_FILE, as_text, read_status
from tests.distributed import run_ranks
from tests.programs import scale_cpt
from tests.training.runs import STEPS, make_run, train

PROJECT = Path(__file__).parents[2]
LIMITS = {"without_progress": 3, "most": 100}


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory):
    """The folder of a run that was stopped after its first step and then finished, and its status
    between.
    """
    folder = tmp_path_factory.mktemp("finished")
    config = make_run(folder, tokens, zero=1)
    assert run_ranks(_train, 2, config, "7.0", True) == [RESUME_LATER] * 2
    stopped = read_status(folder)
    assert run_ranks(_train, 2, config, "7.1", False) == [0, 0]
    return folder, stopped


def _train(config, attempt, stop):
    os.environ["ATTEMPT"] = attempt
    return train(config, stop=stop)


def test_a_stopped_run_waits_and_a_finished_one_is_done(finished):
    folder, stopped = finished
    assert (stopped.state, stopped.step, stopped.restarts) == ("waiting", 1, 0)
    assert stopped.seconds_left is not None and stopped.seconds_left > 0
    assert stopped.checkpoint == str(folder / "checkpoints" / "step_00000001")

    done = read_status(folder)
    assert (done.state, done.step, done.steps, done.restarts) == ("done", STEPS, STEPS, 1)
    assert done.tokens_seen == STEPS * 8 * 32 and done.seconds_left is None
    assert 0 < done.loss < 20 and done.tokens_per_second > 0
    assert not (folder / "training.lock").exists()
    trends = {trend.corpus: trend for trend in done.heldout}
    assert sorted(trends) == ["english", "korean"]
    assert trends["korean"].steps == (0, STEPS)
    first, last = trends["korean"].perplexity
    assert 1 < last < first
    shown = f"held-out perplexity {readable(first)} → {readable(last)} at step 0, {STEPS}"
    assert f"korean      {shown}" in as_text(done).splitlines()


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "pipeline", "status", *map(str, arguments)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)


def test_the_tool_prints_a_run_or_a_line_for_each_of_a_study_or_json_and_loads_no_torch(
    finished, tmp_path
):
    printed = tool(finished[0])
    lines = printed.stdout.splitlines()
    assert lines[1] == "state       done: all steps are done"
    assert len({line.index(line.split(None, 1)[1]) for line in lines}) == 1
    modules = {line.rpartition("|")[2].strip() for line in printed.stderr.splitlines()}
    assert "pydantic" in modules and "torch" not in modules

    (tmp_path / "a.seed_1").symlink_to(finished[0])
    (tmp_path / "b.seed_1").mkdir()
    record_end(tmp_path / "b.seed_1", exit_code=USER_ERROR, error="no text")
    (tmp_path / "tokens").mkdir()
    assert tool(tmp_path).stdout.splitlines() == [
        f"a.seed_1  done    {STEPS} of {STEPS}  all steps are done",
        "b.seed_1  failed          train: no text",
    ]
    assert [run["state"] for run in json.loads(tool(tmp_path, "--json").stdout)] == [
        "done",
        "failed",
    ]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run that a script is about to begin."""
    monkeypatch.setenv("ATTEMPT", "7.0")
    return load_config(PROJECT / "configs" / "demo.yaml").model_copy(
        update={"folder": tmp_path / "run"}
    )


@pytest.fixture
def run(config):
    """The folder of a run that has begun to train."""
    record_training(config, 2, 0)
    return config.folder


def state_of(run: Path) -> tuple[str, str]:
    status = read_status(run)
    return status.state, status.why


def test_a_run_whose_lock_is_held_is_running(run):
    with RunLock(run):
        state, why = state_of(run)
        assert state == "running" and f"pid {os.getpid()}" in why
    state, why = state_of(run)
    assert state == "failed" and why.startswith(
        "train: the last attempt left no reason (cancelled or killed?); "
    )


def test_the_newest_line_decides_and_a_refused_job_changes_nothing(run, monkeypatch):
    record_end(run, exit_code=LOST_RANK, step=3, error="rank 1 on n2 was lost")
    assert state_of(run)[0] == "failed", "no retry was recorded"
    decide_retry(run, stage="train", exit_code=137, **LIMITS)
    state, why = state_of(run)
    assert state == "waiting"
    assert why.startswith(
        "train: rank 1 on n2 was lost (restart 1, 1 of at most 3 without progress); "
    )
    monkeypatch.setenv("ATTEMPT", "8.0")
    record_start(run, "tokenize")
    assert not decide_retry(run, stage="train", exit_code=FOLDER_TAKEN, **LIMITS).again
    assert state_of(run) == (state, why)
    monkeypatch.setenv("ATTEMPT", "7.0")
    record_end(run, exit_code=RESUME_LATER, step=3)
    state, why = state_of(run)
    assert state == "waiting" and why.startswith("train: saved; ")
    decide_retry(run, stage="convert", exit_code=137, without_progress=0, most=100)
    state, why = state_of(run)
    assert state == "failed" and "(1 attempt(s) in a row brought no newer checkpoint" in why


def test_the_forecast_counts_from_the_newest_checkpoint_unless_the_run_trains(run, config):
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    (run / "checkpoints" / "step_00000020" / "manifest.json").touch()
    steps = [{"step": step, "tokens_per_second_per_gpu": 1000.0} for step in range(1, 29)]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in steps), encoding="utf-8"
    )

    def steps_left() -> int:
        status = read_status(run)
        assert status.step == 28 and status.seconds_left and status.tokens_seen
        return round(status.seconds_left * 2 * 1000.0 / (status.tokens_seen / status.step))

    with RunLock(run):
        assert steps_left() == config.schedule.steps - 28
    record_end(run, exit_code=RESUME_LATER, step=28)
    assert steps_left() == config.schedule.steps - 20


def test_an_unfinished_run_says_its_step_where_it_is_converted_or_lacks_a_gate(
    run, config, monkeypatch
):
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    (run / "checkpoints" / "step_00000020" / "manifest.json").touch()
    (run / "checkpoints" / "latest").write_text("step_00000020")
    progress = f"step 20 of {config.schedule.steps}"
    monkeypatch.setattr("pipeline.conversion.convert.convert", lambda *_: True)
    shown = scale_cpt("convert", run)
    assert shown.returncode == 0, shown.stderr
    assert f"{progress}: the run is not finished\n" in shown.stderr
    with pytest.raises(CheckpointError) as refused:
        open_record(run / "gate")
    assert str(refused.value) == (
        f"{run / 'gate' / 'gate.json'}: no such file; the run is at {progress}, and the gate is "
        "fitted after training: finish it, or run the stage gate (scale-cpt gate) for this step"
    )

    gated = (run, "--set", "gate={}")
    monkeypatch.setattr("pipeline.extensions.gate.fit_run.fit_gate", lambda _: (None, False))
    monkeypatch.setattr("pipeline.extensions.gate.table.as_text", lambda _: "")
    monkeypatch.setattr("pipeline.gating.open_old_text.warn_of_open_old_text", lambda *_: None)
    shown = scale_cpt("gate", *gated)
    assert f"{progress}: the run is not finished\n" in shown.stderr, shown.stderr

    (run / TRAINING_FILE).touch()
    shown = scale_cpt("convert", run)
    assert shown.returncode == 0 and "not finished" not in shown.stderr
    with pytest.raises(CheckpointError, match="the gate is not fitted yet: run the stage gate"):
        open_record(run / "gate")


def test_a_serial_stage_is_recorded_while_it_runs_and_after_its_end_or_fault(config):
    with serial_stage(config, "tokenize"):
        state, why = state_of(config.folder)
        assert state == "running" and why.startswith("tokenize: ") and f"pid {os.getpid()}" in why
    assert state_of(config.folder) == ("waiting", "tokenize is done, the next stage follows")
    with pytest.raises(DataError), serial_stage(config, "tokenize"):
        raise DataError("corpus.jsonl: no such file")
    decide_retry(config.folder, stage="tokenize", exit_code=USER_ERROR, **LIMITS)
    why = "tokenize: corpus.jsonl: no such file (its cause must be fixed first)"
    assert state_of(config.folder) == ("failed", why)


def test_a_trained_run_is_not_done_while_a_stage_works_or_was_interrupted(config):
    with serial_stage(config, "train"):
        (config.folder / TRAINING_FILE).touch()
    assert state_of(config.folder) == ("done", "all steps are done")
    with pytest.raises(KeyboardInterrupt), serial_stage(config, "evaluate"):
        state, why = state_of(config.folder)
        assert state == "running" and why.endswith(" (all steps are trained)")
        raise KeyboardInterrupt
    why = "evaluate: interrupted by the user; the same command resumes (all steps are trained)"
    assert state_of(config.folder) == ("stopped", why)
    assert read_status(config.folder).seconds_left is None


def test_a_stage_that_takes_one_process_refuses_the_second(config, monkeypatch):
    with serial_stage(config, "convert", locked=True):
        with (
            pytest.raises(FolderTakenError, match="is at the stage convert"),
            serial_stage(config, "convert", locked=True),
        ):
            pass
        with serial_stage(config, "upscale", locked=True):
            assert (config.folder / "upscale.lock").exists()
    assert not list(config.folder.glob("*.lock"))
    monkeypatch.delenv("ATTEMPT")
    before = (config.folder / "attempts.jsonl").read_bytes()
    with serial_stage(config, "evaluate"):
        pass
    assert (config.folder / "attempts.jsonl").read_bytes() == before, "by hand, no attempt"


def test_a_folder_without_attempts_has_not_started_and_a_missing_one_is_refused(tmp_path):
    status = read_status(tmp_path)
    assert (status.state, status.step, status.checkpoint) == ("not started", 0, None)
    assert "none yet" in as_text(status)
    with pytest.raises(RunFolderError, match="no such run folder"):
        read_status(tmp_path / "nowhere")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Sets what `scontrol` and `sacct` answer of a job; each is None where it knows no such job."""

    def answer(controller: str | None, accounting: str | None = None) -> None:
        programs = {
            "scontrol": controller
            and f"JobId=7 JobName=cpt JobState={controller} Reason=None Requeue=1 Restarts=0",
            "sacct": accounting,
        }
        for name, said in programs.items():
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/sh\necho '{said}'\n" if said else "#!/bin/sh\nexit 1\n")
            program.chmod(0o755)
        slurm_job.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    yield answer
    slurm_job.cache_clear()


NO_END = "train: no end is on record; job 7"
CANCELLED = "was cancelled; the same command resumes"


@pytest.mark.parametrize(
    ("controller", "accounting", "state", "said"),
    [
        ("CANCELLED", None, "stopped", f"{NO_END} {CANCELLED}"),
        (
            None,
            "CANCELLED by 1000",
            "stopped",
            f"{NO_END} {CANCELLED}",
        ),
        ("PENDING", None, "waiting", f"{NO_END} is queued and resumes it"),
        (
            "OUT_OF_MEMORY",
            None,
            "failed",
            f"{NO_END} has ended as OUT_OF_MEMORY; the same command resumes",
        ),
        ("COMPLETING", None, "running", f"{NO_END} is completing"),
        (
            None,
            None,
            "failed",
            "train: the last attempt of job 7 left no reason (cancelled or killed?); it resumes",
        ),
    ],
)
def test_slurm_says_what_became_of_an_attempt_that_left_no_reason(
    slurm, config, controller, accounting, state, said
):
    slurm(controller, accounting)
    record_training(config, 2, 0)
    found, why = state_of(config.folder)
    assert found == state and why.startswith(said)


def test_a_cancelled_run_that_saved_does_not_wait_for_its_job(slurm, config):
    slurm("CANCELLED")
    record_training(config, 2, 0)
    record_end(config.folder, exit_code=RESUME_LATER, step=3)
    assert state_of(config.folder) == (
        "stopped",
        "train: saved; job 7 was cancelled; the same command resumes",
    )
    slurm("PENDING")
    assert state_of(config.folder) == ("waiting", "train: saved; job 7 is queued and resumes it")


@pytest.mark.parametrize(
    ("job", "stage", "state", "said"),
    [
        ("PENDING", "train", "waiting", "train is done, the next stage follows; job 7 is queued"),
        ("RUNNING", "gate", "running", "gate is done, the next stage follows; job 7 is running"),
        ("CANCELLED", "train", "stopped", "train is done, the next stage follows; job 7 was"),
        ("TIMEOUT", "convert", "failed", "convert is done, the next stage follows; job 7 has"),
        ("COMPLETED", "train", "done", "all steps are done"),
        ("RUNNING", "evaluate", "done", "all steps are done"),
        (None, "train", "done", "all steps are done"),
    ],
)
def test_a_trained_run_is_done_when_its_job_has_no_stage_to_come(
    slurm, config, job, stage, state, said
):
    slurm(job)
    with serial_stage(config, stage):
        (config.folder / TRAINING_FILE).touch()
    found, why = state_of(config.folder)
    assert found == state and why.startswith(said)


def test_a_job_that_was_asked_to_save_and_stop_has_not_failed(slurm, config):
    slurm("FAILED")  # as Slurm calls it
    record_training(config, 2, 0)
    record_end(config.folder, exit_code=RESUME_LATER, step=3)
    why = "train: saved, as it was asked to; the same command resumes"
    assert state_of(config.folder) == ("stopped", why)
    decide_retry(config.folder, stage="train", exit_code=RESUME_LATER, without_progress=0, most=9)
    assert state_of(config.folder)[0] == "failed", "it gave up, and nobody asked"


def test_a_job_that_begins_its_next_stage_is_running(slurm, config):
    slurm("RUNNING")
    record_start(config.folder, "tokenize")
    record_end(config.folder, exit_code=0, stage="tokenize")
    done = "tokenize is done, the next stage follows"
    assert state_of(config.folder) == ("running", f"{done}; job 7 is running")
    slurm("COMPLETED")
    assert state_of(config.folder) == (
        "waiting",
        f"{done}; job 7 is done; the same command resumes",
    )


def test_a_cancelled_serial_stage_of_another_node_does_not_run(slurm, config):
    slurm("RUNNING")
    record_start(config.folder, "tokenize")
    records = config.folder / "attempts.jsonl"
    records.write_text(re.sub(r'"machine":"[^"]*"', '"machine":"another"', records.read_text()))
    assert state_of(config.folder)[0] == "running"
    slurm("CANCELLED")
    assert state_of(config.folder) == (
        "stopped",
        "tokenize: no end is on record; job 7 was cancelled; the same command resumes",
    )
