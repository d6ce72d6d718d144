"""The tables of docs/combinations.md are true: what they refuse is refused so, all else is not, and
a test shows it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from pipeline.checks.inputs import RunInputs
from pipeline.checks.model_fit import check_fits
from pipeline.config.method import Lora, Method, ScaleMethod
from pipeline.config.run import load_config
from pipeline.conversion.formats import unsupported_reasons
from pipeline.errors import UserError
from pipeline.model.from_hf import RESIDUAL_KEY, open_base, read_spec
from pipeline.model.spec import DecoderSpec, StoredResidual
from pipeline.scale.plan import plan_expansion
from tests.bases import CONFIGS, STORIES
from tests.training.journeys import JOURNEYS, METHODS, Journey
from tests.training.runs import write_config
from tests.widened import scale_settings

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "combinations.md").read_text(encoding="utf-8")
WORKS = "·"
STORIES_SPEC = open_base(STORIES).spec
WIDENED = StoredResidual(normed_size=24, scale=2.0**-12)
CONFIG_OF = {
    "widened base": json.loads((STORIES / "config.json").read_text())
    | {RESIDUAL_KEY: asdict(WIDENED)},
    "mixture of experts": CONFIGS["qwen3_moe"].to_dict() | {"num_hidden_layers": 5},
}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"ZeRO-{stage}": {"zero": stage} for stage in (1, 2, 3)},
    "tensor parallel": {"parallel__tp_size": 2},
    "sequence parallel": {"parallel__tp_size": 2, "parallel__sequence_parallel": True},
    "vocabulary": {"vocabulary": {"folder": "pieces"}},
    "self-generated text": {"data__replay_loss": "kl"},
    "gate": {"gate": {}},
    "own weights": {
        "method__own_rows": {"min_count": 5},
        "method__own_gains": True,
        "method__low_rank": 4,
        "gate": {},
    },
    "fp8": {"base_precision": "fp8"},
    "nf4": {"base_precision": "nf4"},
    "norm: base": {"method__norm": "base"},
    "compile": {"compile": True},
    "recomputing": {"activation_checkpointing": "all"},
    "asynchronous": {"checkpoints__asynchronous": True},
    "muon": {"schedule__optimizer": "muon"},
    "init_expansion": {"init_expansion": "expansion"},
    "widened base": {},
    "mixture of experts": {},
}
EXPERTS_OVER_RANKS = "experts over ranks"
"""With a mixture alone, and so in a table of its own."""
FEATURES = {
    **{name: {"method": method} for name, method in METHODS.items()},
    **SETTINGS,
    EXPERTS_OVER_RANKS: {"parallel__expert_size": 2},
}
GROUPS = {
    "methods": list(METHODS),
    "SCALE": [name for name, method in METHODS.items() if method["name"] == "scale"],
    "layouts": ["ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel", "sequence parallel"],
    "all": [*METHODS, *SETTINGS],
}
IN_JOURNEYS: dict[str, tuple[str, Any]] = {
    **{name: ("method", name) for name in METHODS},
    **{f"ZeRO-{stage}": ("zero", stage) for stage in (1, 2, 3)},
    "sequence parallel": ("sequence_parallel", True),
    "vocabulary": ("vocabulary", True),
    "self-generated text": ("replay_loss", "kl"),
    "own weights": ("own_weights", True),
    "fp8": ("base_precision", "fp8"),
    "nf4": ("base_precision", "nf4"),
    "norm: base": ("norm", "base"),
    "recomputing": ("activation_checkpointing", "all"),
    "asynchronous": ("asynchronous", True),
    "muon": ("optimizer", "muon"),
}
MATRIX = "tests/training/test_journeys.py::test_it_resumes_to_the_bit"


def table(heading: str) -> tuple[list[str], Iterator[list[str]]]:
    """The header and the rows of the first table below a heading."""
    _, _, below = PAGE.partition(f"\n## {heading}\n")
    lines = re.search(r"(?:^\|.*\n)+", below, flags=re.MULTILINE)
    assert lines is not None, f"no table below {heading}"
    rows = []
    for line in lines[0].splitlines():
        row_cells = line.split("|")[1:-1]
        rows.append([cell.strip().replace("`", "") for cell in row_cells])
    header, _rule, *body = rows
    return header, iter(body)


def cells(*headings: str) -> dict[tuple[str, str], str]:
    """What the tables say about a row and a column."""
    found = {}
    for heading in headings:
        header, rows = table(heading)
        for name, *own in rows:
            assert len(own) == len(header) - 1, f"{heading}: {name}"
            for column, cell in zip(header[1:], own, strict=True):
                if cell:
                    found[name, column] = cell
    return found


REASONS = {number: pattern for number, pattern, _ in table("Reasons")[1]}
PAIRS = cells("A method with a setting", "Two settings")
EXPORTS = cells("Exports")
NOT_TRIED = "?"
SHARED_EXPERTS: list[tuple[str, str, str]] = []
"""What experts over ranks go with: its name, its cell, and the test, if there is one."""
for _names, _cell, _test in table("Experts over ranks")[1]:
    for _name in _names.split(", "):
        SHARED_EXPERTS.append((_name, _cell, _test))


def is_in(journey: Journey, name: str) -> bool:
    if name == "tensor parallel":
        return journey.layout.tp_size > 1
    setting, value = IN_JOURNEYS.get(name, ("method", None))
    return bool(getattr(journey, setting) == value)


def check(cell: str, message: str | None, what: object) -> None:
    """The cell says what is refused, and why."""
    if cell == WORKS:
        assert message is None, f"{what} is refused: {message}"
    else:
        assert message is not None, f"{what} is not refused"
        assert REASONS[cell] in message, f"{what}: reason {cell} is not that {message}"


def fault(pair: tuple[str, ...], folder: Path, ranks: int = 2) -> str | None:
    """How a run with all these features is refused before it reads a file, if it is."""
    changes: dict[str, Any] = {}
    for name in sorted(pair, key=list(FEATURES).index):
        changes |= deepcopy(FEATURES[name])
    if {*pair} == {"preserve", "own weights"}:
        changes["method__own_first_layer"] = 1
    if {*pair} == {"lora", "own weights"}:
        del changes["method__low_rank"]  # LoRA's adapters are such differences
    path = write_config(folder, folder, **{"zero": 1, **changes})
    architecture: dict[str, Any] = {}
    for name in filter(pair.__contains__, CONFIG_OF):  # in this order: a set's would be chance
        architecture |= CONFIG_OF[name]
    (folder / "config.json").write_text(json.dumps(architecture))
    try:
        config = load_config(path)
        assert RunInputs(config, ranks).deepspeed_config
        spec = read_spec(folder / "config.json") if architecture else STORIES_SPEC
        check_fits(config, replace(spec, new_tokens=5 * ("vocabulary" in pair)))
    except UserError as error:
        return str(error)
    return None


def test_every_pair_is_in_the_tables():
    expected = set()
    for method, setting in itertools.product(METHODS, SETTINGS):
        expected.add(frozenset((method, setting)))
    for two_settings in itertools.combinations(SETTINGS, 2):
        expected.add(frozenset(two_settings))
    assert {frozenset(pair) for pair in PAIRS} == expected
    of_experts = {cell for _, cell, _ in SHARED_EXPERTS}
    assert {*PAIRS.values(), *EXPORTS.values(), *of_experts} == {WORKS, "–", NOT_TRIED, *REASONS}


@pytest.mark.parametrize("feature", [*METHODS, *SETTINGS])
def test_runs_are_refused_where_the_tables_say_so_and_nowhere_else(feature, tmp_path):
    for pair, cell in PAIRS.items():
        if pair[0] == feature and cell != "–":  # two values of one setting
            check(cell, fault(pair, tmp_path), pair)


@pytest.mark.full
def test_experts_over_ranks_go_with_what_their_table_says(tmp_path):
    named = {name for name, _, _ in SHARED_EXPERTS}
    assert named == {*METHODS, *SETTINGS, "a dense base"} - {"mixture of experts"}
    for name, cell, test in SHARED_EXPERTS:
        features = [EXPERTS_OVER_RANKS]
        if name != "a dense base":
            features += ["mixture of experts", name]
        found = fault(tuple(features), tmp_path, ranks=4)
        check(WORKS if cell == NOT_TRIED else cell, found, name)
        assert test or cell != WORKS, f"no test is named for {name}"
        if test:
            check_exists(test)


def check_exists(test: str) -> None:
    """Checks that a test of the tables is there."""
    file, _, name = test.partition("::")
    assert re.search(rf"(?m)^def {name}\(", (ROOT / file).read_text(encoding="utf-8")), test


def test_a_test_shows_every_pair_that_works():
    shown: set[frozenset[str]] = set()
    for first, second, test in table("What shows it")[1]:
        check_exists(test)
        left = features_named(first)
        right = features_named(second)
        assert {*left, *right} <= FEATURES.keys(), test
        for pair in itertools.product(left, right):
            # The matrix of training runs names its settings as groups: a pair that no row has is
            # not shown by it.
            if test != MATRIX or is_in_a_journey(pair):
                shown.add(frozenset(pair))

    missing = []
    for pair, cell in PAIRS.items():
        if cell == WORKS and frozenset(pair) not in shown:
            missing.append(pair)
    assert not missing, f"no test is named for {missing}"


def features_named(side: str) -> list[str]:
    """The features of one side of the table `What shows it`, with groups spelled out."""
    features: list[str] = []
    for name in side.split(", "):
        features += GROUPS.get(name, [name])
    return features


def is_in_a_journey(pair: tuple[str, ...]) -> bool:
    """Whether a row of the matrix of training runs has all these features."""
    return any(all(is_in(row, name) for name in pair) for row in JOURNEYS)


def model_of(row: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The section `method`, changes of the base's architecture, and the base, of a row of the table
    of exports."""
    method, _, rest = row.partition(", ")
    settings = dict(METHODS[method])
    if "norm: base" in rest:
        settings["norm"] = "base"
    changes: dict[str, Any] = {}
    if "vocabulary" in rest:
        changes["new_tokens"] = 5
    if "widened base" in rest:
        changes["residual"] = WIDENED
    # The first that the row names: "dense layers" are those of a mixture, and stand before it.
    bases = {
        "Gemma": "gemma2",
        "OLMo": "olmo2",
        "GPT-NeoX": "neox",
        "GLM-4-MoE": "glm4_moe",
        "Qwen3": "qwen3",
        "dense layers": "qwen3_moe dense layer",
        "mixture": "qwen3_moe",
    }
    for name, base in bases.items():
        if name in rest:
            return settings, changes, base
    return settings, changes, "llama"


@pytest.mark.parametrize("row", dict.fromkeys(row for row, _ in EXPORTS))
def test_models_leave_in_the_formats_that_the_table_names(row, base):
    values, changes, name = model_of(row)
    spec: DecoderSpec = replace(base(name).spec, **changes)
    if "own rows" in row:
        values["own_rows"] = "all"
        values["own_first_layer"] = int("from layer 1 on" in row)
    if "own gains" in row:
        values["own_gains"] = True
    settings: Method = TypeAdapter(Method).validate_python(values)
    plan = None
    if isinstance(settings, Lora):
        plan = plan_expansion(settings, spec.widths, spec.num_layers, own_tokens=(1, 2))
    if isinstance(settings, ScaleMethod):
        own = {"own_gains": True} if "own weights" in row else {}
        plan = plan_expansion(
            scale_settings(settings.variant, norm=settings.norm, **own),
            spec.widths,
            spec.num_layers,
        )
    for format, reason in unsupported_reasons(settings, plan, spec, gated="gate" in row).items():
        check(EXPORTS[row, format], reason, (row, format))
