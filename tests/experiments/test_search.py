"""A search over SCALE's settings: what it samples, how it continues after a stop, and what its front is."""

from __future__ import annotations

import json
import time

import pytest
import yaml

from pipeline.errors import ConfigError
from pipeline.experiments import search as search_module
from pipeline.experiments.report.runs import read_runs
from pipeline.experiments.results import Row
from pipeline.experiments.search import Search, comparison, front
from pipeline.experiments.study import load_study
from pipeline.experiments.study_runs import StudyRuns
from tests.experiments.report.studies import figures, rows, write_tried
from tests.experiments.report.studies import write_study as write_results
from tests.experiments.studies import call_tool, study_values, write_study


@pytest.fixture
def runs(tmp_path, tokens) -> StudyRuns:
    path = write_study(tmp_path, study_values(tmp_path, tokens))
    return StudyRuns(load_study(path, tmp_path), str(path))


def test_samples_keep_within_the_budget_and_differ(runs, tmp_path):
    search = Search(runs, tmp_path / "search", multiple_of=4)
    assert search.max_parameters == search._matcher.trained(runs.methods["adapt"])
    search._trials.sampler = search_module.optuna.samplers.RandomSampler(seed=1)
    sampled = []
    for _ in range(25):
        trial = search._trials.ask()
        try:
            sampled.append(search._sampled(trial))
        except search_module.optuna.TrialPruned:
            continue
    assert {method.variant for method in sampled} == {"preserve", "adapt", "route"}
    assert {method.collaborative_modules for method in sampled} == {"attention", "ffn", "both"}
    assert len({method.expansion.hidden_size for method in sampled}) > 1
    assert all(search._matcher.trained(method) <= search.max_parameters for method in sampled)


def test_a_budget_below_the_smallest_expansion_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"--max-parameters: 10; the smallest expansion trains \d{4,}"):
        Search(runs, tmp_path / "search", max_parameters=10)


def test_a_stopped_trial_is_resumed(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search_module, "HEARTBEAT_S", 1)
    with monkeypatch.context() as stopped:
        stopped.setattr(search_module, "run_study", interrupt)
        with pytest.raises(SystemExit):
            Search(runs, tmp_path / "search").run(1)
    first = [trial.params for trial in Search(runs, tmp_path / "search")._trials.trials][-1]
    time.sleep(2.5)

    search = Search(runs, tmp_path / "search")
    search.run(1)
    (row,) = search.rows
    assert [trial.params for trial in search._ended()] == [first]
    assert (tmp_path / "search" / row.folder / "metrics.jsonl").exists()
    assert row.trainable_parameters <= search.max_parameters
    monkeypatch.setattr(search_module, "run_study", interrupt)
    search.run(1)  # nothing is left to do

    # The tool prints and draws the finished trials.
    call_tool(monkeypatch, "search_expansion", tmp_path / "study.yaml", "--trials", 1, "--folder", tmp_path / "search")
    printed = capsys.readouterr().out
    assert row.label in printed and "on the front of both" in printed
    (written,) = json.loads((tmp_path / "search" / "summary.json").read_text())
    assert written["label"] == row.label
    assert row.label in (tmp_path / "search" / "report.html").read_text()


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_study_without_scale_or_without_its_base_is_refused(runs, tmp_path):
    values = yaml.safe_load((tmp_path / "study.yaml").read_text())
    values["methods"] = {"fft": {"label": "Full", "method": {"name": "fft"}, "learning_rates": [1e-3]}}
    path = write_study(tmp_path, {**values, "match": None})
    with pytest.raises(ConfigError, match="methods: expected at least one of SCALE to vary, found none"):
        Search(StudyRuns(load_study(path, tmp_path), "study.yaml"), tmp_path / "search")
    path = write_study(tmp_path, {**values, "match": None, "base": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match=r"nowhere: no such folder; train the study's base first"):
        Search(StudyRuns(load_study(path, tmp_path), "study.yaml"), tmp_path / "search")


def row(label: str, learned: float, forgotten: float) -> Row:
    first = rows((1,))[0]
    return Row.model_validate({**first, "label": label, "before": figures(0, 0), "after": figures(learned, forgotten)})


def test_the_front_is_what_no_other_run_dominates(tmp_path):
    found = [row("good", 0.5, 0.1), row("worse", 0.4, 0.2), row("slow", 0.1, 0.05), row("equal", 0.5, 0.1)]
    assert [row.label for row, _ in front(found)] == ["slow", "good", "equal"]
    study = write_results(tmp_path / "study", rows((1,))[:1], diagnostics=False)  # full fine-tuning: 0.96, 0.18
    write_tried(study, rows((1,))[:1], [0.1, 1.0])
    lines = comparison(found, read_runs([study])).splitlines()
    marked = [line.split()[0] for line in lines if line.endswith("on the front of both")]
    assert marked == ["slow", "good", "equal", "Full", "Full"]
    beaten = comparison([*found, row("best", 2.0, 0.0)], read_runs([study])).splitlines()
    assert [line.split()[0] for line in beaten if line.endswith("on the front of both")] == ["best"]
