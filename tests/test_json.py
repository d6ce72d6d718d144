"""`--json` of the dry run, estimate and status: the keys and types that docs/json.md names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.programs import scale_cpt
from tests.training.runs import write_config

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")
TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "number": (int, float),
    "object": (dict,),
    "list of texts": (list,),
    "list of numbers": (list,),
    "list of objects": (list,),
}


def documented(heading: str) -> dict[str, str]:
    """The types of the keys in the table under a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    keys: dict[str, str] = {}
    for names, kind in re.findall(r"(?m)^\| (`[^|]+) \| ([^|]+) \|", section):
        for name in re.findall(r"`(\w+)`", names):
            keys[name] = kind
    return keys


def check(values: dict[str, Any], heading: str) -> None:
    """An object has the documented keys alone, each null or of its type."""
    keys = documented(heading)
    assert keys and values.keys() == keys.keys(), heading
    for name, kind in keys.items():
        value = values[name]
        assert value is None or isinstance(value, TYPES[kind]), (heading, name, value)
        if kind.startswith("list"):
            inside = TYPES[kind.removeprefix("list of ").removesuffix("s")]
            assert all(isinstance(entry, inside) for entry in value or ()), (heading, name)


def printed(*arguments: object, code: int = 0) -> Any:
    done = scale_cpt(*arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_config(tmp_path / "run", tmp_path / "tokens")


def test_a_dry_run(run):
    plan = printed("train", run, "--dry-run", "--gpus", 2)
    check(plan, "Dry run")
    check(plan["parameters"], "Parameters")
    check(plan["layout"], "A layout")
    for group in plan["groups"]:
        check(group, "A group")
    assert plan["errors"] == [] and len(plan["to_make"]) == 2
    assert sum(group["parameters"] for group in plan["groups"]) == plan["parameters"]["trained"]
    assert plan["tokens"] == 6 * 8 * 32 and plan["formats"]["expansion"] is None
    names = {row["name"] for row in plan["rows"]}
    assert {"memory a rank", "serving", "groups"} <= names

    unmatched = "schedule.learning_rate_factors={router: 2}"
    plan = printed("train", run, "--dry-run", "--gpus", 2, "--set", unmatched, code=1)
    check(plan, "Dry run")
    assert plan["groups"] is None and "matches no parameter" in plan["errors"][0]


def test_an_estimate(run):
    estimate = printed("estimate", run, "--gpus", 2)
    check(estimate, "Estimate")
    check(estimate["parameters"], "Parameters")
    for layout in estimate["layouts"]:
        check(layout, "A layout")
        assert sum(layout["memory_bytes"].values()) == layout["total_bytes"]
    places = [{key: layout[key] for key in estimate["own"]} for layout in estimate["layouts"]]
    assert estimate["own"] in places and estimate["recommended"] in places
    assert estimate["served_flops_per_token"] is None

    nothing_fits = ("--gpu-memory-gib", 0.001, "--set", "gate={}")
    estimate = printed("estimate", run, "--gpus", 2, *nothing_fits, code=1)
    assert estimate["recommended"] is None and estimate["reason"].startswith("nothing fits")
    served = estimate["served_flops_per_token"]
    assert 0 < served["closed"] < served["open"] < estimate["flops_per_token"]


def test_a_status(run):
    line = {"perplexity/korean": 9.5, "bits_per_byte/korean": 1.5}
    lines = [{"step": 0, **line}, {"step": 1, "loss": 3.0}, {"step": 2, **line}]
    (run.parent / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    status = printed("status", run.parent)
    check(status, "Status")
    (trend,) = status["heldout"]
    check(trend, "A trend")
    assert trend == {"corpus": "korean", "steps": [0, 2], "perplexity": [9.5, 9.5]}


def test_training_itself_prints_no_json(run):
    done = scale_cpt("train", run, "--json")
    assert done.returncode != 0 and "only --dry-run takes these options" in done.stderr
