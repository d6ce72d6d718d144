"""A study's file: what it may leave out, and every fault in one line before anything starts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from pipeline.config.method import Lora
from pipeline.errors import ConfigError
from pipeline.model.from_hf import read_spec
from pipeline.sizing.matching import trained_parameters
from pipeline.studies.runs import StudyRuns, Trial
from pipeline.studies.study import load_study
from tests.bases import STORIES
from tests.studies.studies import study_values, write_study


@pytest.fixture
def opened(tmp_path, tokens):
    """The runs of the small study after `change` was made to its values."""

    def open_changed(change=lambda values: None, data=None):
        values = study_values(tmp_path, tokens)
        change(values)
        path = write_study(tmp_path, values)
        return StudyRuns(load_study(path, data or tmp_path), str(path))

    return open_changed


def test_runs_differ_in_what_the_study_compares_and_nothing_else(opened):
    runs = opened()
    first = runs.trial(Trial("adapt", 2e-3, 1)).config
    other_seed = runs.trial(Trial("adapt", 2e-3, 2)).config
    lora = runs.trial(Trial("lora", 1e-5, 1)).config
    assert first.folder == runs.study.folder / "adapt.lr_0.002.seed_1"
    assert first.base == STORIES
    varied = {"name", "folder", "method", "seed", "schedule"}
    assert first.model_dump(exclude=varied) == other_seed.model_dump(exclude=varied) == lora.model_dump(exclude=varied)
    assert (first.seed, other_seed.seed, lora.seed) == (1, 2, 1)
    same_rate = lora.schedule.model_copy(update={"learning_rate": first.schedule.learning_rate})
    assert first.schedule == other_seed.schedule == same_rate


def test_the_study_in_the_documentation_is_valid(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)[0], encoding="utf-8")
    runs = StudyRuns(load_study(path, tmp_path), str(path))
    for trial in (Trial("fft", 1e-5, 1), Trial("lora", 1e-4, 1)):
        assert f"{runs.study.folder}/{trial}/run.yaml" in page


def test_a_method_that_does_not_fit_the_base_is_found_before_the_others_train(opened):
    def change(values):
        adapt = {**values["methods"]["adapt"]["method"], "l_fp": 99}
        values["methods"]["last"] = {"label": "Last", "method": adapt, "learning_rates": [1e-3]}

    with pytest.raises(ConfigError, match=r"study\.yaml: methods\.last: .*l_fp"):
        opened(change).check_fits_base()
    opened().check_fits_base()
    opened(lambda values: values.update(base="not/there/yet")).check_fits_base()


def test_a_matched_method_trains_as_much_as_the_one_it_follows(opened):
    runs = opened()
    assert isinstance(runs.methods["lora"], Lora)
    trained = [trained_parameters(method, read_spec(runs.base)) for method in runs.methods.values()]
    assert trained[0] == pytest.approx(trained[1], rel=0.04)  # a rank is a step of 6 %


def test_stages_build_on_each_other(opened):
    def change(values):
        settings = {**values["settings"], "schedule": {**values["settings"]["schedule"], "learning_rate": 1e-3}}
        values["stages"] = {"first": {"settings": settings}, "second": {"settings": settings, "ranks": 2}}

    runs = opened(change)
    first, second = (run.config for run in runs.stages)
    assert (first.base, second.base, runs.base) == (STORIES, first.folder / "hf", second.folder / "hf")
    assert first.method.name == "fft" and first.data.folder == second.data.folder
    (task,) = runs.pending_tasks()  # matched methods have no size before their base exists
    assert (task.run.config, task.stages) == (first, ("tokenize", "train", "convert"))
    assert runs.run_count() == 2 + 2 + 3


def test_the_folder_of_texts_is_substituted(opened, tmp_path):
    def change(values):
        values["settings"]["data"]["corpora"]["korean"]["input"] = ["${data}/korean.jsonl"]

    corpus = opened(change).trial(Trial("adapt", 1.0, 1)).config.data.corpora["korean"]
    assert corpus.input == [f"{tmp_path}/korean.jsonl"]
    with pytest.raises(ConfigError, match=r"^--data .*/nowhere: no such folder; .* reads its texts from there"):
        opened(change, tmp_path / "nowhere")
    opened(data=tmp_path / "nowhere")  # not needed, so not checked


def faulty(change):
    def changed(values):
        change(values, values["methods"], values["settings"])

    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda study, methods, _: study.pop("base"), "give base or scratch"),
        (lambda study, methods, _: study.update(seeds=[1, 1]), "seeds: each once"),
        (lambda study, methods, _: study.update(match="lora"), "match: expected one of the methods that has a section"),
        (
            lambda study, methods, _: methods["lora"].update(method={"name": "fft"}),
            "methods.lora: give method or matched",
        ),
        (lambda study, methods, _: methods["adapt"]["method"].pop("l_fp"), "methods.adapt.method: .*needs l_fp"),
        (lambda study, methods, _: methods["lora"].update(learning_rates=[]), "methods.lora.learning_rates: "),
        (lambda study, methods, _: methods["lora"].update(learning_rates=[1.0, 1.0]), "learning_rates: each once"),
        (lambda study, methods, settings: settings.update(sead=1), "settings, for adapt: .*sead: unknown key"),
        (lambda study, methods, settings: settings["data"].update(folder="${home}"), "no other place than"),
        (lambda study, methods, settings: settings.update(folder="runs/x"), "settings.folder: the study sets it"),
        (lambda study, methods, settings: settings.update(seed=7), "settings.seed: the study sets it for every run"),
        (
            lambda study, methods, settings: settings["schedule"].update(learning_rate=1.0),
            "settings.schedule.learning_rate: the study sets it for every run",
        ),
        (
            lambda study, methods, settings: study.update(stages={"first": {"settings": {**settings, "base": "x"}}}),
            "stages.first: settings.base: the study sets it for every run",
        ),
        (
            lambda study, methods, settings: study.update(stages={"tokens": {"settings": settings}}),
            "stages.tokens: the study uses a folder of that name",
        ),
        (
            lambda study, methods, _: methods["lora"].update(label="SCALE-Adapt"),
            "expected a different label for each, found 'SCALE-Adapt' twice",
        ),
        (
            lambda study, methods, settings: settings["data"]["corpora"]["korean"].pop("heldout_input"),
            "expected a held-out part of a corpus of role new",
        ),
    ],
)
def test_a_fault_is_one_line_that_says_where(opened, change, said):
    with pytest.raises(ConfigError, match=said) as raised:
        opened(faulty(change))
    assert "study.yaml: " in str(raised.value) and "\n" not in str(raised.value)


def test_a_run_with_other_settings_is_refused(opened):
    trial = Trial("adapt", 2e-3, 1)
    run = opened().trial(trial)
    run.write()
    assert yaml.safe_load(run.path.read_text())["seed"] == 1
    longer = opened(lambda values: values["settings"]["schedule"].update(steps=9)).trial(trial)
    longer.write()  # nothing is trained yet
    (run.config.folder / "checkpoints").mkdir()
    longer.write()
    with pytest.raises(ConfigError, match=r"run.yaml: this run was made with other settings .* \(schedule\)"):
        run.write()


def test_a_finished_run_of_other_settings_does_not_count_as_done(opened):
    trial = Trial("adapt", 2e-3, 1)
    run = opened().trial(trial)
    run.write()
    (run.config.folder / "training.json").write_text(json.dumps({"steps": 1}))  # stopped early
    assert run.is_trained

    def elsewhere(values):
        korean = values["settings"]["data"]["corpora"]["korean"]
        korean["input"] = [os.path.relpath(place) for place in korean["input"]]

    assert opened(elsewhere).trial(trial).is_trained  # the same texts, by another path
    other = opened(lambda values: values["settings"]["schedule"].update(weight_decay=0.5))
    with pytest.raises(ConfigError, match=r"run.yaml: this run was made with other settings .* \(schedule\)"):
        other.finished_count()
