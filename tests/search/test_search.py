"""A small search from its command to its proposal, by real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config.run import load_config, parse_config
from pipeline.errors import BudgetError, RunFolderError, StudyError
from pipeline.model.from_hf import read_spec
from pipeline.run_folder.metrics import read_metrics
from pipeline.search.candidates import Space, candidates
from pipeline.search.frontier import read_by_hand
from pipeline.search.judgement import Probe
from pipeline.search.proposal import PROPOSAL, Proposal
from pipeline.search.rounds import Rounds, Search
from pipeline.study.description import load_study
from pipeline.study.runs import StudyRuns, Trial
from pipeline.training.divergence import REPORT as DIVERGENCE
from tests.bases import STORIES
from tests.training.runs import write_config

ROOT = Path(__file__).parents[2]
RATE, TOO_FAST, DIVERGED = 2e-3, 1e5, 2e5
SHAPE = "preserve-h16"


@pytest.fixture(scope="module")
def searched(tokens, tmp_path_factory) -> tuple[Path, Path, str]:
    """The run's file, the search's folder, and what was printed of three candidates; one had diverged before."""
    folder = tmp_path_factory.mktemp("search")
    config = write_config(folder / "run", tokens, zero=1)
    lost = folder / "search" / "steps_2" / f"{SHAPE}.lr_{DIVERGED:g}.seed_1234"
    lost.mkdir(parents=True)
    (lost / DIVERGENCE).write_text("{}")
    command = [sys.executable, "tools/plan_expansion.py", str(config), "--max-increase", "0.5"]
    command += ["--folder", str(folder / "search"), "--jobs", "2", "--steps", "2", "4"]
    command += ["--variants", "preserve", "--width-shares", "0.25"]
    command += ["--learning-rates", *map(str, (RATE, TOO_FAST, DIVERGED))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return config, folder / "search", done.stdout


def test_it_proposes_settings_that_the_run_can_be_trained_with(searched):
    config, folder, printed = searched
    table, settings = printed.split("\n\n", 1)
    rows = [line.split() for line in table.splitlines()[2:]]
    assert [(row[0], float(row[1]), row[-1]) for row in rows] == [
        (SHAPE, RATE, "within"),
        (SHAPE, TOO_FAST, "beyond"),
        (SHAPE, DIVERGED, "diverged"),
    ]
    proposed = yaml.safe_load(settings)
    assert proposed["schedule"] == {"learning_rate": RATE}
    assert proposed["forgetting"] == {"max_increase": 0.5}
    run = load_config(folder / "steps_4" / f"{SHAPE}.lr_{RATE:g}.seed_1234" / "run.yaml")
    values = yaml.safe_load(config.read_text())
    assert parse_config({**values, "method": proposed["method"]}, source="proposed").method == run.method
    assert run.schedule == load_config(config).schedule.model_copy(update={"steps": 4})


def test_its_figures_are_those_of_the_probes(searched):
    _, folder, _ = searched
    found = json.loads((folder / PROPOSAL).read_text())
    assert found["max_increase"] == 0.5
    by_rate = {one["learning_rate"]: one for one in found["candidates"]}
    assert found["choice"] == by_rate[RATE]
    assert {rate: [probe["steps"] for probe in one["probes"]] for rate, one in by_rate.items()} == {
        RATE: [2, 4],
        TOO_FAST: [2],
        DIVERGED: [],
    }
    for probe in by_rate[RATE]["probes"]:
        run = folder / f"steps_{probe['steps']}" / f"{SHAPE}.lr_{RATE:g}.seed_1234"
        first, *_, last = [line for line in read_metrics(run / "metrics.jsonl") if "perplexity/korean" in line]
        assert last["perplexity/korean"] == pytest.approx(probe["new_perplexity"])
        assert last["perplexity/korean"] < first["perplexity/korean"]
        assert first["perplexity/english"] == pytest.approx(probe["replay_before"])
        assert last["forgetting/english"] == pytest.approx(probe["increase"])
        trained = json.loads((run / "training.json").read_text())["trainable_parameters"]
        assert trained == by_rate[RATE]["trainable_parameters"]


def test_again_nothing_is_trained_and_where_none_keeps_the_budget_it_says_what_to_change(searched):
    config, folder, _ = searched
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("metrics.jsonl")}
    run, spec = load_config(config), read_spec(STORIES)
    space = Space(("preserve",), (0.25,), learning_rates=(RATE, TOO_FAST, DIVERGED)).completed(run, spec)
    again = Search(run, str(config), folder, budget=1e-9, rounds=Rounds((2, 4)))
    proposal = Proposal(again.run(candidates(run, spec, space), jobs=2))
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("metrics.jsonl")}
    assert "within" not in proposal.as_text()
    with pytest.raises(BudgetError, match=r"no candidate is expected to keep within the budget .* forgets least, \+"):
        proposal.as_yaml()


def test_a_candidate_that_diverges_does_not_end_the_search(tokens, tmp_path):
    decays = {"schedule__weight_decay": 1e34, "stability": {"max_skipped_steps": 0}}  # to no number, in one step
    config = write_config(tmp_path / "run", tokens, zero=1, **decays)
    run, spec = load_config(config), read_spec(STORIES)
    space = Space(("adapt",), (0.1,), (1,), ("both",), learning_rates=(5.0,))
    search = Search(run, str(config), tmp_path / "search", budget=0.5, rounds=Rounds((2, 4)))
    proposal = Proposal(search.run(candidates(run, spec, space), jobs=1))
    assert proposal.as_text().endswith("diverged")
    with pytest.raises(BudgetError, match="every candidate diverged, 1 in all; try lower --learning-rates"):
        proposal.as_yaml()


def test_the_shipped_search_is_of_the_study_that_it_is_compared_with(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = Path("configs/korean_small.yaml").read_text()
    config = parse_config(yaml.safe_load(text), source="korean_small")
    runs = StudyRuns(load_study(Path("configs/studies/korean.yaml"), Path("data")), "korean")
    assert config.base == runs.base
    monkeypatch.setattr(StudyRuns, "base", runs.study.scratch.architecture)  # known before the base is trained
    by_hand = runs.trial(Trial("adapt", config.schedule.learning_rate, runs.study.seeds[0])).config
    own = {"name", "folder", "base"}
    assert config.model_dump(exclude=own) == by_hand.model_dump(exclude=own)


def test_a_choice_is_held_against_a_study_of_the_same_base_and_length(tmp_path):
    known = {"label": "LoRA", "after": {}, "chosen": False, "at_the_edge": False}
    diverged = {**known, "learning_rate": 1.0, "new_perplexity": None, "replay_perplexity": None}
    after = {**known, "learning_rate": 1e-3, "new_perplexity": 5.0, "replay_perplexity": 12.0}
    before = {"english": {"perplexity": 10.0}}
    row = {"label": "LoRA", "steps": 4, "roles": {"english": "replay"}, "before": before, "after": before}
    (tmp_path / "summary.json").write_text(json.dumps([row]))
    with pytest.raises(RunFolderError, match=r"learning_rates.json: no such file; tools/run_study.py writes it"):
        read_by_hand(tmp_path, 4)
    (tmp_path / "learning_rates.json").write_text(json.dumps([after, diverged]))
    with pytest.raises(StudyError, match="expected runs of 8 steps, as the last round's, found 4; end --steps with 4"):
        read_by_hand(tmp_path, 8)
    by_hand = read_by_hand(tmp_path, 4)
    better = Probe(4, 5.0, 11.0, 10.0, 0.1)
    assert by_hand.verdict_on(better) == (
        "beyond the frontier of 1 runs by hand: better than LoRA at 0.001 (5.00, 12.00)"
    )
    (tmp_path / "summary.json").write_text(json.dumps([{**row, "roles": {"english": "new"}}]))
    with pytest.raises(StudyError, match="expected a held-out part of a corpus of role replay, found none"):
        read_by_hand(tmp_path, 4)
    with pytest.raises(StudyError, match=r"expected replay perplexity 11.00 before training, .* found 10.00"):
        by_hand.verdict_on(Probe(4, 5.0, 11.0, 11.0, 0.0))
