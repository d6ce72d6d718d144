"""`scale-cpt combinations`: docs/combinations.md is what it prints, and a test shows what works."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from pipeline.config.base import BasePrecision
from pipeline.config.method import ScaleMethod, method_settings
from pipeline.config.schedule import CORE_OPTIMIZERS
from pipeline.errors import CONFIG_ERROR
from pipeline.extensions.compatibility.ask import refusal
from pipeline.extensions.compatibility.features import (
    BASES,
    FEATURES,
    METHODS,
    SETTINGS,
    contradicts,
    settings_of,
)
from pipeline.extensions.compatibility.legend import legend
from pipeline.extensions.compatibility.tables import TRAINED, tables
from tests.extensions.compatibility.shown import (
    EXPERTS_OVER_RANKS,
    NOT_TRIED,
    OPEN_WEIGHTS,
    SHOWN,
    shown_pairs,
)
from tests.programs import scale_cpt

PROJECT = Path(__file__).parents[3]
PAGE = (PROJECT / "docs" / "combinations.md").read_text(encoding="utf-8")
SHOWN_BASES = ("mixture", "widened")
"""The bases besides a dense one that a test must show with every feature."""


@pytest.fixture(scope="module")
def printed() -> str:
    return "\n".join([*legend(), *tables(), ""])


def test_the_page_is_what_the_command_prints(printed):
    _, heading, below = PAGE.partition("## Features\n")
    assert heading + below == printed, (
        "put what scale-cpt combinations prints below the introduction"
    )


def test_the_head_says_what_nothing_has_tried():
    head, _, _ = PAGE.partition("## Features\n")
    names = ", ".join(name for name in NOT_TRIED if name not in OPEN_WEIGHTS)
    assert f"experts over ranks with {names}" in " ".join(head.split())


def refused_pairs(printed: str) -> set[frozenset[str]]:
    """What the tables of refusals say: every feature of the first column with every one of the
    second."""
    tables, _, _ = printed.partition("\n## Exports\n")
    pairs: set[frozenset[str]] = set()
    for row in re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", tables):
        ones, others = (cell.split(", ") for cell in row)
        pairs.update(map(frozenset, itertools.product(ones, others)))
    return pairs


def test_the_tables_have_every_refusal(printed):
    pairs = refused_pairs(printed)
    assert {"freeze", "gate"} in pairs and {"compile", "ZeRO-3"} in pairs
    assert {"vocabulary", "transformers"} in pairs
    asked = [*itertools.product(SETTINGS, METHODS), *itertools.combinations(SETTINGS, 2)]
    asked += itertools.product((*METHODS, *SETTINGS), BASES)
    for names in asked:
        if contradicts(*names) is None:
            assert (frozenset(names) in pairs) == (refusal(names) is not None), names


def test_a_test_shows_every_pair_that_works(printed):
    refused = refused_pairs(printed)
    pairs = [*itertools.product(METHODS, SETTINGS), *itertools.combinations(SETTINGS, 2)]
    pairs += itertools.product((*METHODS, *SETTINGS), SHOWN_BASES)
    shown = shown_pairs()
    untried = {frozenset((EXPERTS_OVER_RANKS, name)) for name in (*NOT_TRIED, "widened")}
    untried.add(frozenset((EXPERTS_OVER_RANKS, "mixture")))  # which it is a layout of
    missing = []
    known = refused | untried | shown.keys()
    for one, other in pairs:
        if contradicts(one, other) is None and frozenset((one, other)) not in known:
            missing.append((one, other))
    assert not missing, f"no test is named for {missing}"


@pytest.mark.parametrize("test", sorted({test for _, _, test in SHOWN}))
def test_the_tests_that_are_named_are_there(test):
    file, _, name = test.partition("::")
    assert re.search(rf"(?m)^def {name}\(", (PROJECT / file).read_text(encoding="utf-8"))


def test_what_is_shown_are_features():
    for pair in shown_pairs():
        assert pair <= FEATURES.keys()


def test_every_method_precision_and_optimizer_is_a_feature():
    values = {name: settings_of([name]) for name in (*METHODS, *SETTINGS)}
    methods = {settings["method"]["name"] for settings in values.values() if "method" in settings}
    assert methods == set(method_settings())
    variants = set(get_args(ScaleMethod.model_fields["variant"].annotation))
    assert variants <= METHODS.keys()
    precisions = {settings.get("base_precision", "bf16") for settings in values.values()}
    assert precisions == set(get_args(BasePrecision))
    optimizers = {settings.get("schedule.optimizer", "adamw") for settings in values.values()}
    assert optimizers == set(CORE_OPTIMIZERS)


def test_the_plain_run_that_features_are_added_to_is_accepted():
    for base in BASES:
        assert refusal([base]) is None, base


@pytest.mark.parametrize(
    ("names", "answer"),
    [
        (["adapt", "muon"], "adapt, muon: works"),
        (["fft", "fp8"], r"fft, fp8: refused: base_precision: .* trains, which a matrix in fp8"),
        (["compile", "mixture"], "compile, mixture: refused: compile: .* compiled mixture"),
        (["fft", "gate", "vocabulary"], "fft, gate, vocabulary: refused: gate: method fft"),
        (["adapt", "norm: base", "merged"], "adapt, norm: base, merged: works"),
        (["adapt", "norm: base", "gate", "merged"], ".*, merged: refused: a gate decides for each"),
        (["fft", "compile", "ZeRO-3", "merged"], ".* refused: compile: expected ZeRO-1 or 2"),
    ],
)
def test_why_asks_one_question(names, answer):
    done = scale_cpt("combinations", "--why", *names)
    assert done.returncode == 0
    (said,) = done.stderr.splitlines()
    assert said.endswith(f"asking the checks about {', '.join(names)}: loading the libraries")
    assert re.match(answer, done.stdout), done.stdout


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["adapt", "fp9"], "no feature is called fp9 (did you mean fp8?)"),
        (["fp8"], "expected two features or more"),
        (["adapt", "merged", "scale"], "at most one of them a format of exports"),
        (["fp8", "nf4"], "fp8 and nf4 are two values of base_precision"),
        (["mixture", "dense"], "mixture and dense are two values of base"),
    ],
)
def test_a_question_about_nothing_is_refused_in_one_line(names, message):
    done = scale_cpt("combinations", "--why", *names)
    assert done.returncode == CONFIG_ERROR
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_every_row_of_the_exports_is_a_run():
    for row in TRAINED:
        assert refusal(row) is None, row


def test_the_first_table_does_not_wait_for_torch():
    program = (
        "import sys\n"
        "class Out:\n"
        "    def write(self, text):\n"
        "        print(repr(text), 'torch' in sys.modules, file=sys.stderr)\n"
        "        sys.exit(0)\n"
        "    def flush(self): pass\n"
        "from pipeline.cli import main\n"
        "sys.argv[1:] = ['combinations']\n"
        "sys.stdout = Out()\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[0] == "'## Features' False"
