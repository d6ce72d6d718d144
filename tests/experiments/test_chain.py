"""Whether a study's chain of jobs goes on, by what the runs of the ended jobs left in their folders."""

from __future__ import annotations

import pytest

from pipeline.errors import CONFIG_ERROR, USER_ERROR, StudyError
from pipeline.experiments.pending import due_after
from pipeline.experiments.study import load_study
from pipeline.experiments.study_runs import StudyRuns
from pipeline.run_folder.attempts import Decision, record_end
from tests.experiments.studies import study_values, write_study
from tests.experiments.test_due import HIGH, LOW, diverge, finish

ONLY = "adapt.lr_0.002.seed_1"


@pytest.fixture
def runs(tmp_path, tokens) -> StudyRuns:
    path = write_study(tmp_path, study_values(tmp_path, tokens))
    return StudyRuns(load_study(path, tmp_path), str(path))


def test_it_goes_on_past_a_rate_that_diverged(runs):
    finish(runs, LOW, 40.0)
    diverge(runs, HIGH)
    assert [task.name for task in due_after(runs, [str(LOW), str(HIGH)])] == [
        ONLY,
        "adapt.lr_0.002.seed_2",
        "lora.lr_1e-05.seed_2",
    ]


def test_it_ends_with_what_the_run_says_of_itself(runs):
    finish(runs, HIGH, 40.0)
    run = runs.trial(LOW)
    run.write()
    decision = Decision(False, "its cause is to be mended first")
    record_end(run.config.folder, stage="train", exit_code=CONFIG_ERROR, error="no such corpus", retry=decision)
    with pytest.raises(StudyError) as raised:
        due_after(runs, [str(LOW), str(HIGH)])
    said = f"{LOW}: its job is over, and it is not done; the run is failed: train: no such corpus (its cause is to be"
    assert str(raised.value).startswith(said)
    assert raised.value.exit_code == USER_ERROR
    assert str(LOW) in [task.name for task in due_after(runs, [])]  # submitted by hand


def test_it_ends_where_jobs_never_began(runs):
    for trial in (LOW, HIGH):
        runs.trial(trial).write()
    with pytest.raises(StudyError) as raised:
        due_after(runs, [str(LOW), str(HIGH)])
    assert f"(nor are {LOW}); the run is not started: no attempt is on record" in str(raised.value)
