"""A study's file: what it may leave out, and every fault in one line before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import ConfigError, DataError
from studies.harness.runs import StudyRuns
from studies.harness.study import load_study
from tests.bases import STORIES


def put(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Puts `changes` into nested values; None removes a key."""
    for key, change in changes.items():
        if change is None:
            del values[key]
        elif isinstance(change, dict) and key in values:
            put(values[key], change)
        else:
            values[key] = change


def test_runs_differ_in_what_the_study_compares_and_nothing_else(opened):
    runs = opened()
    first = runs.compared("adapt", 2e-3, 1).config
    other_seed = runs.compared("adapt", 2e-3, 2).config
    lora = runs.compared("lora", 1e-5, 1).config
    assert first.folder == runs.study.folder / "adapt.lr_0.002.seed_1"
    assert first.base == STORIES
    varied = {"name", "folder", "method", "seed", "schedule"}
    assert (
        first.model_dump(exclude=varied)
        == other_seed.model_dump(exclude=varied)
        == lora.model_dump(exclude=varied)
    )
    assert (first.seed, other_seed.seed, lora.seed) == (1, 2, 1)
    same_rate = lora.schedule.model_copy(update={"learning_rate": first.schedule.learning_rate})
    assert first.schedule == other_seed.schedule == same_rate


def test_the_study_in_the_documentation_is_valid(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)[0], encoding="utf-8")
    runs = StudyRuns(load_study(path, tmp_path), str(path))
    for name in ("fft.lr_1e-05.seed_1", "lora.lr_0.0001.seed_1"):
        assert f"{runs.study.folder}/{name}/run.yaml" in page


def test_a_method_that_does_not_fit_the_base_or_a_missing_text_is_found_before_anything_trains(
    opened,
):
    def change(values):
        adapt = {**values["methods"]["adapt"]["method"], "l_fp": 99}
        values["methods"]["last"] = {"label": "Last", "method": adapt, "learning_rates": [1e-3]}

    with pytest.raises(ConfigError, match=r"study\.yaml: methods\.last: .*l_fp"):
        opened(change).check()
    opened().check()
    opened(lambda values: values.update(base="not/there/yet")).check()

    def without_text(values):
        data = values["settings"]["data"]
        data["folder"] = "nowhere"
        data["corpora"]["korean"]["input"] = ["texts.jsonl"]

    with pytest.raises(DataError, match=r"texts.jsonl: no such file"):
        opened(without_text).check()


def test_stages_build_on_each_other(opened):
    def change(values):
        settings = {
            **values["settings"],
            "schedule": {**values["settings"]["schedule"], "learning_rate": 1e-3},
        }
        values["stages"] = {
            "first": {"settings": settings},
            "second": {"settings": settings, "ranks": 2},
        }

    runs = opened(change)
    first, second = (run.config for run in runs.stages)
    assert (first.base, second.base, runs.base) == (
        STORIES,
        first.folder / "hf",
        second.folder / "hf",
    )
    assert first.method.name == "fft" and first.data.folder == second.data.folder
    (task,) = runs.pending_tasks()
    assert (task.run.config, task.stages) == (first, ("tokenize", "train", "convert"))


def test_the_folder_of_texts_is_substituted(opened, tmp_path):
    def change(values):
        values["settings"]["data"]["corpora"]["korean"]["input"] = ["${data}/korean.jsonl"]

    corpus = opened(change).compared("adapt", 1.0, 1).config.data.corpora["korean"]
    assert corpus.input == [f"{tmp_path}/korean.jsonl"]
    with pytest.raises(
        ConfigError, match=r"^--data .*/nowhere: no such folder; .* reads its texts from there"
    ):
        opened(change, tmp_path / "nowhere")
    opened(data=tmp_path / "nowhere")  # not needed, so not checked


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base": None}, "give base or scratch"),
        ({"seeds": [1, 1]}, "seeds: each once"),
        ({"methods": {"adapt": {"method": {"l_fp": None}}}}, "methods.adapt.method: .*needs l_fp"),
        ({"methods": {"lora": {"learning_rates": []}}}, "methods.lora.learning_rates: "),
        ({"methods": {"lora": {"learning_rates": [1.0, 1.0]}}}, "learning_rates: each once"),
        (
            {"methods": {"lora": {"label": "SCALE-Adapt"}}},
            "a different label for each, found 'SCALE-Adapt' twice",
        ),
        (
            {"methods": {"lora": {"chosen_by": "adapt"}}},
            "methods.lora.chosen_by: adapt is no method here with a gate",
        ),
        ({"methods": {"lora": {"averages": [0.5]}}}, "methods.lora.averages: only of method fft"),
        ({"settings": {"sead": 1}}, "settings, for adapt: .*sead: unknown key"),
        ({"settings": {"folder": "runs/x"}}, "settings: folder: the study sets it"),
        (
            {"settings": {"schedule": {"learning_rate": 1.0}}},
            "settings: schedule.learning_rate: the study sets it",
        ),
        (
            {"stages": {"first": {"settings": {"base": "x"}}}},
            "stages.first.settings: base: the study sets it",
        ),
        (
            {"stages": {"tokens": {"settings": {}}}},
            "stages.tokens: the study uses a folder of that name",
        ),
        (
            {"settings": {"data": {"corpora": {"korean": {"heldout_input": None}}}}},
            "expected a held-out part of a corpus of role new",
        ),
    ],
)
def test_a_fault_is_one_line_that_says_where(opened, change, said):
    with pytest.raises(ConfigError, match=said) as raised:
        opened(lambda values: put(values, change))
    assert "study.yaml: " in str(raised.value) and "\n" not in str(raised.value)


def test_a_run_of_other_settings_is_refused_and_does_not_count_as_done(opened):
    adapt = ("adapt", 2e-3, 1)
    run = opened().compared(*adapt)
    run.write()
    assert yaml.safe_load(run.path.read_text())["seed"] == 1
    longer = opened(lambda values: values["settings"]["schedule"].update(steps=9))
    longer.compared(*adapt).write()  # nothing is trained yet
    (run.folder / "checkpoints").mkdir()
    said = r"run.yaml: this run was made with other settings .* \(schedule\)"
    with pytest.raises(ConfigError, match=said):
        run.write()
    (run.folder / "training.json").write_text(json.dumps({"steps": 1}))  # stopped early
    assert longer.compared(*adapt).is_trained
    with pytest.raises(ConfigError, match=said):
        opened().pending_tasks()
