"""A search from a run's file and the command line, checked before anything starts."""

from __future__ import annotations

import argparse
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from pipeline.config.data import Role
from pipeline.config.method import CollaborativeModules
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import ConfigError
from pipeline.estimation.matching import Variant
from pipeline.model.from_hf import read_spec
from pipeline.search.candidates import Candidate, Space, candidates
from pipeline.search.rounds import Rounds, Search
from pipeline.study.runs import measured_corpora


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `open_search` reads."""

    def add(flag: str, meaning: str, **kind: Any) -> None:  # noqa: ANN401  # argparse's own
        parser.add_argument(flag, default=argparse.SUPPRESS, help=meaning, **kind)

    many: dict[str, Any] = {"nargs": "+"}
    add("--variants", "of SCALE (default: all)", choices=get_args(Variant), **many)
    add("--width-shares", "growth, in shares of the base's widths (default 1/16 1/8 1/4)", type=float, **many)
    add("--l-fp", "default: 3/16 of the layers, half of them, all but one", type=int, **many)
    add("--modules", "default: attention both", choices=get_args(CollaborativeModules), **many)
    add("--learning-rates", "default: the run's own, a third and three times of it", type=float, **many)
    add("--max-parameters", "the most that may train (default: any number)", type=int)
    add("--multiple-of", "of added hidden and FFN widths (default 8)", type=int)
    add("--steps", "of the probes, round by round (default 25 50 100)", type=int, **many)
    add("--keep", "share of the candidates that go on to the next round (default 1/3)", type=float)
    add("--ranks", "processes of a probe (default 1)", type=int)


def open_search(path: Path, arguments: argparse.Namespace) -> tuple[Search, list[Candidate]]:
    """The search for the run that `path` describes, and what it tries.

    Raises:
        ConfigError: the run cannot be, measures no old or no new text, or a flag cannot be; BaseModelError: no base.
    """
    config = load_config(path)
    given = vars(arguments)
    _check_measured(config, path)
    _check_flags(given)
    budget = given["max_increase"] or config.forgetting.max_increase
    if budget is None:
        raise ConfigError(f"{path}: no forgetting budget: give --max-increase, or forgetting.max_increase")
    named = {**given, "collaborative_modules": given.get("modules")}
    named = {key: tuple(value) if isinstance(value, list) else value for key, value in named.items() if value}
    space = Space(**{field.name: named[field.name] for field in fields(Space) if field.name in named})
    rounds = Rounds(**{field.name: named[field.name] for field in fields(Rounds) if field.name in named})
    if rounds.steps[-1] > config.schedule.steps:
        raise ConfigError(
            f"--steps: expected at most the run's schedule.steps {config.schedule.steps}, found {rounds.steps[-1]}"
        )
    folder = given["folder"] or config.folder.with_name(f"{config.folder.name}-search")
    search = Search(config, str(path), folder, budget, rounds, given.get("ranks", 1))
    spec = read_spec(config.base)
    return search, candidates(config, spec, space.completed(config, spec))


def _check_measured(config: RunConfig, path: Path) -> None:
    roles: dict[Role, str] = {"new": "learning", "replay": "forgetting"}
    for role, measured in roles.items():
        if not measured_corpora(config, role):
            raise ConfigError(
                f"{path}: data.corpora: expected a held-out part of a corpus of role {role}, by which {measured} is "
                "measured, found none; set heldout_input or heldout_fraction"
            )


def _check_flags(given: dict[str, Any]) -> None:
    """Raises ConfigError where a number cannot be."""
    for name in ("max_increase", "width_shares", "learning_rates", "max_parameters", "multiple_of", "steps", "ranks"):
        value = given.get(name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not number > 0:
                raise ConfigError(f"--{name.replace('_', '-')}: expected a number above 0, found {number}")
    if any(l_fp < 0 for l_fp in given.get("l_fp", [])):
        raise ConfigError(f"--l-fp: expected 0 or more, found {min(given['l_fp'])}")
    steps = given.get("steps", [])
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ConfigError(f"--steps: expected more of them in every round, found {' '.join(map(str, steps))}")
    if not 0 < given.get("keep", 1.0) <= 1:
        raise ConfigError(f"--keep: expected a share above 0, at most 1, found {given['keep']}")
