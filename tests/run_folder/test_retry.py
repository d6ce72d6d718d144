"""A run is restarted while it makes progress, and not forever without progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.errors import INTERNAL_FAULT, LOST_RANK, RESUME_LATER, USER_ERROR
from pipeline.run_folder.attempts import (
    NAME,
    read_attempts,
    record_end,
    record_start,
    record_training,
)
from pipeline.run_folder.retry import decide_retry


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Makes one attempt of a series and returns what was decided after it; with `exit_code` None it
    is killed.
    """
    config = load_config(Path("configs/demo.yaml")).model_copy(update={"folder": tmp_path})

    def make(name, *, saved=None, exit_code=LOST_RANK, started=True, stage="train", **limits):
        monkeypatch.setenv("ATTEMPT", name)
        if started:
            record_training(config, 2, 0)
        elif exit_code is None:
            record_start(tmp_path, stage)
        if saved is not None:
            folder = tmp_path / "checkpoints" / f"step_{saved:08d}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").touch()
        if exit_code is not None:
            limits = {"without_progress": 3, "most": 100, **limits}
            return decide_retry(tmp_path, stage=stage, exit_code=exit_code, **limits)
        return None

    return make


def until_given_up(**attempt: object) -> list[tuple[dict[str, object], bool]]:
    """Four such attempts: the last is not retried."""
    return [(attempt, again) for again in (True, True, True, False)]


RESUMED = {"exit_code": RESUME_LATER}
SERIAL = {"started": False}
KILLED = {"exit_code": None}


@pytest.mark.parametrize(
    "attempts",
    [
        until_given_up(),
        until_given_up(**SERIAL),
        [({}, True), ({}, True), ({}, True), ({"saved": 500}, True), *until_given_up()],
        [
            (RESUMED | {"saved": 2}, True),
            (RESUMED | {"saved": 4}, True),
            *until_given_up(**RESUMED),
        ],
        until_given_up(**RESUMED, **SERIAL, stage="evaluate"),
        [
            *[(RESUMED | SERIAL | {"stage": "tokenize"}, True)] * 6,
            *until_given_up(**SERIAL, stage="tokenize"),
        ],
        [
            ({"saved": 1, "most": 2}, True),
            ({"saved": 2, "most": 2}, True),
            ({"saved": 3, "most": 2}, False),
        ],
        [({"exit_code": USER_ERROR}, False)],
        # Killed with their job: what they saved is progress, and serial stages do not count.
        [(KILLED, None), ({"saved": 4, "without_progress": 0}, True)],
        [*[(KILLED | SERIAL | {"stage": "tokenize"}, None)] * 5, ({"without_progress": 1}, True)],
        [*[(KILLED, None)] * 3, ({}, False)],
    ],
)
def test_restarts_without_a_newer_checkpoint_are_limited(attempt, attempts):
    decisions = [attempt(f"7.{number}", **given) for number, (given, _) in enumerate(attempts)]
    assert [decision and decision.again for decision in decisions] == [
        again for _, again in attempts
    ]


def test_another_job_has_its_own_count_and_no_progress_by_an_earlier_ones_checkpoints(attempt):
    for number in range(4):
        attempt(f"6.{number}", saved=number + 1)
    assert [attempt(f"7.{number}", started=False).again for number in range(4)] == [
        True,
        True,
        True,
        False,
    ]
    assert "4 attempt(s) in a row brought no newer checkpoint" in attempt("7.3").why


def test_the_error_that_the_run_recorded_is_kept_when_the_script_records_the_end(
    attempt, tmp_path, monkeypatch
):
    monkeypatch.setenv("ATTEMPT", "7.0")
    record_end(tmp_path, exit_code=INTERNAL_FAULT, step=12, error="ValueError: boom")
    with (tmp_path / NAME).open("a") as file:
        file.write('{"attempt": "7.0", "jo')  # cut short by a kill
    attempt("7.0", started=False, exit_code=137)
    [found] = read_attempts(tmp_path)
    assert found.end is not None and found.end.retry is not None and found.end.retry.again
    assert (found.end.exit_code, found.end.step, found.end.error) == (137, 12, "ValueError: boom")


def test_attempts_that_left_no_record_brought_no_progress(attempt, tmp_path):
    attempt("7.0", saved=500)
    (tmp_path / NAME).rename(tmp_path / "kept")
    (tmp_path / NAME).mkdir()  # neither read nor written, also by root
    decisions = [attempt(f"7.{number}", started=False) for number in range(5)]
    assert [decision.again for decision in decisions] == [True, True, True, False, False]
    (tmp_path / NAME).rmdir()
    (tmp_path / "kept").rename(tmp_path / NAME)
    assert attempt("7.3", started=False).why == "restart 4, 3 of at most 3 without progress"
    assert attempt("7.9", saved=600).why == "restart 10, 0 of at most 3 without progress"
