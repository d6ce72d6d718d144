"""A run is restarted while it makes progress, and not forever without progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.errors import CONFIG_ERROR, INTERNAL_FAULT, LOST_RANK, RESUME_LATER, USER_ERROR
from pipeline.run_folder.attempts import NAME, decide, read_attempts, record_end, record_stage, record_start


@pytest.fixture
def config(tmp_path):
    return load_config(Path("configs/demo.yaml")).model_copy(update={"folder": tmp_path})


@pytest.fixture
def attempt(config, tmp_path, monkeypatch):
    """Makes one attempt of a series and returns what was decided after it."""

    def make(name, *, saved=None, exit_code=LOST_RANK, started=True, stage="train", **limits):
        monkeypatch.setenv("ATTEMPT", name)
        if started:
            record_start(config, 2, 0)
        if saved is not None:
            folder = tmp_path / "checkpoints" / f"step_{saved:08d}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").touch()
        limits = {"without_progress": 3, "most": 100, **limits}
        return decide(tmp_path, stage=stage, exit_code=exit_code, **limits)

    return make


def test_without_progress_three_restarts_are_made(attempt):
    assert [attempt(f"7.{number}").again for number in range(4)] == [True, True, True, False]


def test_a_newer_checkpoint_is_progress(attempt):
    saved = [None, None, None, 500, None, None, None, None]
    decisions = [attempt(f"7.{number}", saved=step) for number, step in enumerate(saved)]
    assert [decision.again for decision in decisions] == [True] * 6 + [True, False]
    assert "4 attempt(s) in a row brought no newer checkpoint" in decisions[-1].why


def test_attempts_that_failed_before_training_count_too(attempt):
    assert [attempt(f"7.{number}", started=False).again for number in range(4)] == [True, True, True, False]


def test_another_job_has_its_own_count(attempt):
    for number in range(4):
        attempt(f"7.{number}")
    assert attempt("8.0").again


def test_progress_of_an_attempt_without_a_recorded_end_counts(attempt, config, monkeypatch):
    monkeypatch.setenv("ATTEMPT", "7.0")
    record_start(config, 2, 0)
    assert attempt("7.1", saved=4, without_progress=0).again


def test_there_is_a_cap_on_all_restarts(attempt):
    decisions = [attempt(f"7.{number}", saved=number + 1, most=2) for number in range(3)]
    assert [decision.again for decision in decisions] == [True, True, False]


@pytest.mark.parametrize("code", [USER_ERROR, CONFIG_ERROR])
def test_a_users_fault_is_never_tried_again(attempt, code):
    assert not attempt("7.0", exit_code=code).again


def test_the_error_that_the_run_recorded_is_kept_when_the_script_records_the_end(attempt, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTEMPT", "7.0")
    record_end(tmp_path, exit_code=INTERNAL_FAULT, step=12, error="ValueError: boom")
    attempt("7.0", started=False, exit_code=137)
    ended = read_attempts(tmp_path)[-1].ended
    assert ended is not None
    assert (ended.exit_code, ended.step, ended.error) == (137, 12, "ValueError: boom")
    assert ended.retry is not None and ended.retry.again


def test_a_line_cut_short_by_a_kill_hides_no_other(attempt, tmp_path):
    attempt("7.0")
    with (tmp_path / NAME).open("a") as file:
        file.write('{"attempt": "7.1", "jo')
    attempt("7.2")
    assert [attempt.name for attempt in read_attempts(tmp_path)] == ["7.0", "7.2"]


def test_every_record_is_one_line(attempt, tmp_path):
    attempt("7.0")
    attempt("7.1")
    lines = (tmp_path / NAME).read_bytes().splitlines()
    assert len(lines) == 4 and all(lines)


def test_only_a_save_with_a_newer_checkpoint_is_progress(attempt):
    saved = [2, 4, 6, 8, None, None, None, None]
    decisions = [attempt(f"7.{number}", saved=step, exit_code=RESUME_LATER) for number, step in enumerate(saved)]
    assert [decision.again for decision in decisions] == [True] * 7 + [False]


def test_a_stage_longer_than_a_jobs_time_limit_is_given_up(attempt):
    decisions = [attempt(f"7.{number}", stage="evaluate", started=False, exit_code=RESUME_LATER) for number in range(4)]
    assert [decision.again for decision in decisions] == [True, True, True, False]


@pytest.mark.parametrize("stage", ["tokenize", "sample"])
def test_a_corpus_may_be_stopped_any_number_of_times_but_may_not_fail_as_often(attempt, stage):
    turn = {"stage": stage, "started": False}
    assert all(attempt(f"7.{number}", exit_code=RESUME_LATER, **turn).again for number in range(6))
    assert [attempt(f"7.{number}", **turn).again for number in range(6, 10)] == [True, True, True, False]


def test_requeues_of_a_serial_stage_do_not_count_as_without_progress(attempt, tmp_path, monkeypatch):
    for number in range(5):
        monkeypatch.setenv("ATTEMPT", f"7.{number}")
        record_stage(tmp_path, "tokenize")
    assert attempt("7.5").why == "restart 6, 1 of at most 3 without progress"


def test_attempts_that_left_no_record_brought_no_progress(attempt, tmp_path):
    attempt("7.0", saved=500)
    (tmp_path / NAME).rename(tmp_path / "kept")
    (tmp_path / NAME).mkdir()  # neither read nor written, also by root
    decisions = [attempt(f"7.{number}", started=False) for number in range(5)]
    assert [decision.again for decision in decisions] == [True, True, True, False, False]
    stopped = [attempt(f"7.{number}", started=False, stage="tokenize", exit_code=RESUME_LATER) for number in (1, 5)]
    assert [decision.again for decision in stopped] == [True, False]

    (tmp_path / NAME).rmdir()
    (tmp_path / "kept").rename(tmp_path / NAME)
    assert attempt("7.3", started=False).why == "restart 4, 3 of at most 3 without progress"
    assert attempt("7.9", saved=600).why == "restart 10, 0 of at most 3 without progress"


def test_checkpoints_of_an_earlier_job_are_no_progress(attempt, tmp_path):
    attempt("6.0", saved=500)
    assert [attempt(f"7.{number}", started=False).again for number in range(4)] == [True, True, True, False]
