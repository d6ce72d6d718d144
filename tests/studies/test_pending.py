"""What is pending of a study, and which learning rate each method gets, by its runs' folders."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.errors import CONFIG_ERROR, USER_ERROR, StudyError
from pipeline.files.json_files import write_record
from pipeline.gating.folder import GateRecord
from pipeline.run_folder.attempts import Decision, record_end
from studies.harness.runs import StudyRuns
from tests.studies.studies import STEPS

ONLY = "adapt.lr_0.002.seed_1"
ADAPT = ("adapt", 2e-3, 1)
LOW, HIGH = ("lora", 1e-5, 1), ("lora", 2e-3, 1)
LOW_NAME, HIGH_NAME = "lora.lr_1e-05.seed_1", "lora.lr_0.002.seed_1"
Compared = tuple[str, float, int]
"""A compared run: method, learning rate and seed."""


@pytest.fixture
def runs(opened) -> StudyRuns:
    return opened()


def finish(runs: StudyRuns, compared: Compared, perplexity: float | None) -> None:
    """Writes what a finished run leaves in its folder; a perplexity of None is JSON's null."""
    run = runs.compared(*compared)
    run.write()
    lines = (
        {"step": step, "perplexity/korean": perplexity, "bits_per_byte/korean": 1.0}
        for step in (0, STEPS)
    )
    (run.config.folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    (run.config.folder / "training.json").write_text(json.dumps({"steps": STEPS}))


def diverge(runs: StudyRuns, compared: Compared) -> None:
    run = runs.compared(*compared)
    run.write()
    (run.config.folder / "divergence.json").write_text("{}")


def names(runs: StudyRuns) -> list[str]:
    return [task.name for task in runs.pending_tasks()]


def test_corpora_are_made_once_before_the_compared_runs(opened, tmp_path, tokens):
    """Cleaned, tokenized and written by the base: runs of other seeds read the same."""
    folder = shutil.copytree(tokens, tmp_path / "tokens")

    def samples(values):
        values["settings"]["data"]["folder"] = str(folder)
        values["settings"]["data"]["corpora"]["own"] = {
            "role": "self_generated",
            "sample": {"tokens": 50},
        }

    def cleans(values):
        samples(values)
        values["settings"]["data"]["corpora"]["korean"]["clean"] = {"language": "ko"}

    def with_stage(values):
        samples(values)
        schedule = {**values["settings"]["schedule"], "learning_rate": 1e-3}
        values["stages"] = {"first": {"settings": {**values["settings"], "schedule": schedule}}}

    (task,) = opened(samples).pending_tasks()
    assert (task.name, task.stages) == (f"{ONLY}: sample", ("sample",))
    (folder / "korean" / "manifest.json").rename(tmp_path / "korean")
    assert [task.stages for task in opened(samples).pending_tasks()] == [("tokenize",)]
    assert [task.stages for task in opened(cleans).pending_tasks()] == [("clean", "tokenize")]
    (tmp_path / "korean").rename(folder / "korean" / "manifest.json")
    (folder / "own").mkdir()
    (folder / "own" / "manifest.json").write_text("{}")
    assert ONLY in names(opened(samples))
    (task,) = opened(with_stage).pending_tasks()
    assert task.stages == ("tokenize", "sample", "train", "convert")


def test_a_gate_of_other_settings_is_fitted_again(opened):
    """A gate, or another one, may be asked for after a run is finished."""

    def with_gate(**settings) -> StudyRuns:
        return opened(lambda values: values["methods"]["adapt"].update(settings={"gate": settings}))

    def stages(runs: StudyRuns) -> list[tuple[str, ...]]:
        return [task.stages for task in runs.pending_tasks() if task.name == ONLY]

    finish(opened(), ADAPT, 40.0)
    assert stages(opened()) == []
    wanted = with_gate(tokens=400)
    run = wanted.compared(*ADAPT)
    assert stages(wanted) == [("upscale", "train", "gate")]
    (run.folder / "gate").mkdir()
    (run.folder / "gate" / "gate.json").write_text("{")
    assert stages(wanted) == [("upscale", "train", "gate")]
    record = {name: 0 for name, field in GateRecord.model_fields.items() if field.is_required()}
    record |= {"request": {"settings": run.config.gate.model_dump(mode="json")}}
    record |= {"features": "token", "heldout": {}}
    write_record(run.folder / "gate" / "gate.json", GateRecord.model_validate(record))
    assert stages(wanted) == []
    assert stages(with_gate(tokens=500)) == [("upscale", "train", "gate")]


def test_other_seeds_run_at_the_rate_that_learned_most(runs):
    finish(runs, LOW, 40.0)
    assert runs.chosen_rate("lora") is None
    finish(runs, HIGH, None)  # not finite, as of a run that nearly diverged
    assert runs.chosen_rate("lora") == LOW[1]
    finish(runs, HIGH, 30.0)
    assert runs.chosen_rate("lora") == HIGH[1]
    assert names(runs) == ["adapt.lr_0.002.seed_1", "adapt.lr_0.002.seed_2", "lora.lr_0.002.seed_2"]


def test_a_rate_that_diverged_is_not_chosen_or_tried_again(runs):
    finish(runs, LOW, 40.0)
    diverge(runs, HIGH)
    assert runs.chosen_rate("lora") == LOW[1]
    assert [task.name for task in runs.pending_tasks([LOW_NAME, HIGH_NAME])] == [
        ONLY,
        "adapt.lr_0.002.seed_2",
        "lora.lr_1e-05.seed_2",
    ]
    finish(runs, HIGH, 30.0)  # somebody trained it after all
    assert runs.chosen_rate("lora") == HIGH[1]


def test_a_run_that_diverged_is_pending_where_there_is_no_other_rate(runs):
    for compared in (ADAPT, ("lora", 1e-5, 2)):
        diverge(runs, compared)
    finish(runs, LOW, 30.0)
    finish(runs, HIGH, 40.0)
    assert {ONLY, "lora.lr_1e-05.seed_2"} <= set(names(runs))
    (runs.compared(*LOW).config.folder / "training.json").unlink()
    (runs.compared(*HIGH).config.folder / "training.json").unlink()
    diverge(runs, LOW)
    diverge(runs, HIGH)
    with pytest.raises(
        StudyError, match=r"methods.lora: every one of its learning_rates diverged; give lower ones"
    ):
        runs.pending_tasks()


def test_a_chain_of_jobs_ends_with_the_error_of_the_run(runs):
    finish(runs, HIGH, 40.0)
    run = runs.compared(*LOW)
    run.write()
    decision = Decision(False, "its cause is to be mended first")
    record_end(
        run.config.folder,
        stage="train",
        exit_code=CONFIG_ERROR,
        error="no such corpus",
        retry=decision,
    )
    with pytest.raises(StudyError) as raised:
        runs.pending_tasks([LOW_NAME, HIGH_NAME])
    said = (
        f"{LOW_NAME}: not finished, though the jobs have ended; the first is failed: train: no "
        "such corpus (its cause"
    )
    assert str(raised.value).startswith(said)
    assert raised.value.exit_code == USER_ERROR
    assert LOW_NAME in [task.name for task in runs.pending_tasks([])]  # submitted by hand
