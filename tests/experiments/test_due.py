"""What is left of a study, and at which learning rate a method goes on, by what its runs left in their folders."""

from __future__ import annotations

import json

import pytest

from pipeline.errors import RunFolderError, StudyError
from pipeline.experiments.pending import chosen_rate, due, finished_count
from pipeline.experiments.study import load_study
from pipeline.experiments.study_runs import StudyRuns, Trial
from tests.experiments.studies import STEPS, study_values, write_study

LOW, HIGH = Trial("lora", 1e-5, 1), Trial("lora", 2e-3, 1)


@pytest.fixture
def runs(tmp_path, tokens) -> StudyRuns:
    path = write_study(tmp_path, study_values(tmp_path, tokens))
    return StudyRuns(load_study(path, tmp_path), str(path))


def finish(runs: StudyRuns, trial: Trial, perplexity: float | None, steps: tuple[int, ...] = (0, STEPS)) -> None:
    """A run's folder as one that ended so leaves it; None is what JSON has for no number."""
    run = runs.trial(trial)
    run.write()
    lines = ({"step": step, "perplexity/korean": perplexity, "bits_per_byte/korean": 1.0} for step in steps)
    (run.config.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.config.folder / "training.json").write_text(json.dumps({"steps": STEPS}))


def diverge(runs: StudyRuns, trial: Trial) -> None:
    run = runs.trial(trial)
    run.write()
    (run.config.folder / "divergence.json").write_text("{}")


def names(runs: StudyRuns) -> list[str]:
    return [task.name for task in due(runs)]


def test_other_seeds_follow_at_the_rate_that_learned_most(runs):
    finish(runs, LOW, 40.0)
    assert chosen_rate(runs, "lora") is None
    finish(runs, HIGH, 30.0)
    assert chosen_rate(runs, "lora") == HIGH.learning_rate
    assert names(runs) == ["adapt.lr_0.002.seed_1", "adapt.lr_0.002.seed_2", "lora.lr_0.002.seed_2"]


def test_a_run_that_ended_without_a_number_is_the_worst(runs):
    finish(runs, LOW, 40.0)
    finish(runs, HIGH, None)
    assert chosen_rate(runs, "lora") == LOW.learning_rate


def test_a_rate_that_diverged_is_out_and_not_tried_again(runs):
    finish(runs, LOW, 40.0)
    diverge(runs, HIGH)
    assert chosen_rate(runs, "lora") == LOW.learning_rate
    assert "lora.lr_1e-05.seed_2" in names(runs) and str(HIGH) not in names(runs)
    assert finished_count(runs) == 2
    finish(runs, HIGH, 30.0)  # somebody brought it to its end
    assert chosen_rate(runs, "lora") == HIGH.learning_rate


def test_where_there_is_no_other_rate_a_run_that_diverged_is_still_due(runs):
    only, chosen = Trial("adapt", 2e-3, 1), Trial("lora", 1e-5, 2)
    for trial in (only, chosen):
        diverge(runs, trial)
    finish(runs, LOW, 30.0)
    finish(runs, HIGH, 40.0)
    assert {str(only), str(chosen)} <= set(names(runs))
    (runs.trial(LOW).config.folder / "training.json").unlink()
    (runs.trial(HIGH).config.folder / "training.json").unlink()
    diverge(runs, LOW)
    diverge(runs, HIGH)
    with pytest.raises(StudyError, match=r"methods.lora: every one of its learning_rates diverged; give lower ones"):
        due(runs)


def test_figures_that_are_gone_are_a_fault_in_one_line(runs):
    finish(runs, LOW, 40.0)
    finish(runs, HIGH, 40.0, steps=(STEPS,))
    with pytest.raises(RunFolderError, match=r"lora.lr_0.002.seed_1/metrics.jsonl: no validation after the first; "):
        chosen_rate(runs, "lora")
