"""What a search tries, and what it refuses before anything starts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.methods import method_for
from pipeline.model.from_hf import read_spec
from pipeline.parallel.topology import SINGLE
from pipeline.search.candidates import Space, candidates, hidden_sizes, usual_l_fp
from pipeline.search.opening import add_search_options, open_search
from tests.bases import STORIES
from tests.training.runs import write_config

LLAMA_1B = Path(__file__).parents[2] / "configs" / "bases" / "llama-3.2-1b.json"
SMALL = Space(width_shares=(1 / 8, 1 / 4), learning_rates=(1e-3, 2e-3))


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path, tmp_path, method__norm="base"))


def test_every_combination_is_there_once_and_can_be_built(config):
    spec = read_spec(STORIES)
    space = SMALL.completed(config, spec)
    found = candidates(config, spec, space)
    assert len(found) == len({str(one) for one in found}) == (1 + 2 * 3 * 2) * 2 * 2
    for one in found:
        assert one.method.norm == "base"  # what is not searched is the run's
        assert (one.method.l_fp is None) == (one.method.variant == "preserve")
        with_rates = [other for other in found if other.shape == one.shape]
        assert {other.method for other in with_rates} == {one.method}
    smallest, largest = (pick(found, key=lambda one: one.trained) for pick in (min, max))
    built = method_for(largest.method, Path(), 1).build(spec, SINGLE, "none")
    assert largest.trained == sum(p.numel() for p in built.parameters() if p.requires_grad) > smallest.trained

    within = candidates(config, spec, replace(space, max_parameters=smallest.trained))
    assert {one.shape for one in within} == {one.shape for one in found if one.trained == smallest.trained}


def test_sizes_follow_the_base_and_the_paper():
    assert hidden_sizes((1 / 16, 1 / 8, 1 / 4), 2048, 8) == [128, 256, 512]
    assert hidden_sizes((1 / 16, 1 / 8, 1 / 4), 64, 8) == [8, 16]
    assert [usual_l_fp(layers) for layers in (1, 2, 5, 16)] == [(0,), (0, 1), (1, 2, 4), (3, 8, 15)]
    assert read_spec(LLAMA_1B).num_layers == 16


def test_learning_rates_lie_around_the_runs_own(config):
    rates = Space().completed(config, read_spec(STORIES)).learning_rates
    assert rates == (6.67e-4, 2e-3, 6e-3)


def opened(path: Path, *flags: str):
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-increase", type=float)
    parser.add_argument("--folder", type=Path)
    add_search_options(parser)
    return open_search(path, parser.parse_args(["--steps", "2", *flags]))


def test_flags_decide_and_what_they_leave_the_run_does(tmp_path):
    path = write_config(tmp_path / "run", tmp_path, forgetting={"max_increase": 0.3})
    search, found = opened(path, "--variants", "route", "--l-fp", "0", "2", "--modules", "ffn", "--keep", "0.5")
    assert (search.budget, search.rounds.steps, search.rounds.keep) == (0.3, (2,), 0.5)
    assert search.folder == tmp_path / "run-search"
    assert {(one.method.variant, one.method.l_fp, one.method.collaborative_modules) for one in found} == {
        ("route", l_fp, "ffn") for l_fp in (0, 2)
    }
    study = search.study(found[:2], 2)
    assert "forgetting" not in study.settings and study.settings["schedule"]["steps"] == 2
    assert opened(path, "--max-increase", "0.1")[0].budget == 0.1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "no forgetting budget: give --max-increase, or forgetting.max_increase"),
        ("--max-increase 0", "--max-increase: expected a number above 0, found 0.0"),
        ("--max-increase -0.1", "--max-increase: expected a number above 0, found -0.1"),
        ("--max-increase 1 --learning-rates 1 0", "--learning-rates: expected a number above 0, found 0.0"),
        ("--max-increase 1 --steps 2 2", "--steps: expected more of them in every round, found 2 2"),
        ("--max-increase 1 --steps 2 7", "--steps: expected at most the run's schedule.steps 6, found 7"),
        ("--max-increase 1 --keep 1.5", "--keep: expected a share above 0, at most 1, found 1.5"),
        ("--max-increase 1 --l-fp 5", "--l-fp: expected 0 to 4 of 5 layers, found 5"),
        ("--max-increase 1 --max-parameters 9", "--max-parameters: expected .* or more, .* found 9; allow more"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_in_one_line(flags, said, tmp_path):
    with pytest.raises(ConfigError, match=said) as raised:
        opened(write_config(tmp_path, tmp_path), *flags.split())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("corpus", "measured"), [("korean", "learning"), ("english", "forgetting")])
def test_both_roles_must_be_measured(corpus, measured, tmp_path):
    path = write_config(tmp_path, tmp_path)
    values = yaml.safe_load(path.read_text())
    del values["data"]["corpora"][corpus]["heldout_input"]
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=f"run.yaml: data.corpora: expected a held-out part .* by which {measured} "):
        opened(path, "--max-increase", "1")
