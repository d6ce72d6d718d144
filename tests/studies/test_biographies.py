"""The study of biographies: texts of the paper's proportions, and the tables of a summary."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import DataError
from studies.biographies import show
from studies.biographies.make_texts import (
    ATTRIBUTES,
    biographies,
    make_people,
    make_pools,
    make_roster,
    question,
    write_corpora,
)
from studies.biographies.show import end_table, matched_table, rates_table
from tests.data.helpers import contents
from tests.files import read_jsonl


def call(monkeypatch: pytest.MonkeyPatch, program: Any, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, arguments)])
    program.main()


def test_people_have_the_papers_proportions_and_all_values():
    pools = make_pools()
    assert len(set(pools.first_names)) == 400
    assert len(set(pools.middle_names)) == 400
    assert len(set(pools.last_names)) == 1000
    assert len(set(pools.cities)) == 200
    assert len(set(pools.universities)) == 300
    assert len(set(pools.majors)) == 100
    assert len(set(pools.companies)) == 263
    assert len(set(pools.company_cities)) == 200, "a city without a company"

    # So many people that each value of the pools is taken.
    people = make_people(20_000, pools, 3)
    assert {person.birth_city for person in people} == set(pools.cities)
    assert {person.university for person in people} == set(pools.universities)
    assert {person.major for person in people} == set(pools.majors)
    assert {person.company for person in people} == set(pools.companies)
    city_of = dict(zip(pools.companies, pools.company_cities, strict=True))
    for person in people:
        assert person.company_city == city_of[person.company]

    # Half of all people have biographies; half of those are Task 0; Task 1 is new people.
    roster = make_roster(202, pool_fraction=0.05, seed=1)
    assert len(roster["pretrained"]) == 101
    assert len(roster["task0"]) == 50
    assert len(roster["task1"]) == 20
    assert roster["task0"] == roster["pretrained"][:50]
    names = [person.name for person in (*roster["pretrained"], *roster["task1"])]
    assert len(set(names)) == len(names), "Task 1's people have biographies, or share a name"
    assert roster == make_roster(202, pool_fraction=0.05, seed=1)
    assert roster != make_roster(202, pool_fraction=0.05, seed=2)


def test_the_files_are_reproducible_and_not_overwritten(tmp_path: Path):
    arguments = {"pool_fraction": 0.05, "seed": 5, "vocab_size": 400}
    roster = write_corpora(tmp_path / "a", 40, **arguments)
    write_corpora(tmp_path / "b", 40, **arguments)
    assert [*contents(tmp_path / "a").values()] == [*contents(tmp_path / "b").values()]
    texts = [record["text"] for record in read_jsonl(tmp_path / "a" / "biographies.jsonl")]
    expected = []
    for person in roster["pretrained"]:
        expected += biographies(person, 5)
    assert sorted(texts) == sorted(expected)
    asked = read_jsonl(tmp_path / "a" / "task1" / "major.jsonl")
    assert asked == [question(person, "major") for person in roster["task1"]]
    all_text = " ".join(texts)
    for person in roster["task1"]:
        assert person.name not in all_text

    tokenizer = load_tokenizer(tmp_path / "a" / "tokenizer")
    assert tokenizer.vocab_size == 400
    assert (tokenizer.document_start, tokenizer.document_end) == ((), (0,))
    assert tokenizer.decode(tokenizer.reference.encode([texts[0]]).ids) == texts[0]

    before = contents(tmp_path / "a")
    assert write_corpora(tmp_path / "a", 40, **arguments) == roster
    with pytest.raises(
        DataError,
        match=r"expected the biographies of .*'seed': 6.*, found .*'seed': 5.*another --output",
    ):
        write_corpora(tmp_path / "a", 40, **{**arguments, "seed": 6})
    assert contents(tmp_path / "a") == before


def figures(task0: float, task1: float) -> dict[str, dict[str, float]]:
    """The company's city is fully known; the other five have these shares on average."""
    found = {}
    for task, known in (("task0", task0), ("task1", task1)):
        for at, attribute in enumerate(ATTRIBUTES):
            share = 1.0 if attribute == "company_city" else known + 0.01 * (at - 2)
            found[f"{task}_{attribute}"] = {
                "perplexity": 2.0,
                "first_token_accuracy": share,
                "first_token_probability": share / 2,
                "exact_match": share / 4,
            }
    return found


def row(label: str, seed: int, at_end: float) -> dict[str, Any]:
    return {
        "label": label,
        "seed": seed,
        "learning_rate": 3e-3,
        "trainable_parameters": 1234567,
        "steps": 40,
        "roles": {name: "replay" if name.startswith("task0") else "new" for name in figures(0, 0)},
        "before": figures(0.9, 0.1),
        "during": [
            {"step": step, "figures": figures(0.9 - step / 100, 0.5)} for step in (10, 20, 30)
        ],
        "after": figures(at_end, 0.8),
    }


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    tried = {**row("Full fine-tuning", 1, 0.5), "learning_rate": 0.5, "chosen": False}
    rows = [
        row("Full fine-tuning", 1, 0.1),
        tried,
        row("Full fine-tuning", 2, 0.2),
        row("SCALE-Route", 1, 0.7),
    ]
    (tmp_path / "summary.json").write_text(
        json.dumps([*rows, {**tried, "before": {}, "during": [], "after": {}}])
    )
    return tmp_path


def cells(text: str) -> list[list[str]]:
    """The figures of each line, behind its label."""
    return [[line.split("  ")[0], *re.split(r"  +", line)[1:]] for line in text.splitlines()]


def test_all_tables_are_printed_and_another_study_is_refused(summary: Path, monkeypatch, capsys):
    """The end is the mean over seeds; the company's city is separate."""
    call(monkeypatch, show, summary)
    printed = capsys.readouterr().out
    rows = show.read_summary(summary)
    assert all(own(rows) in printed for own in (end_table, matched_table, rates_table))
    _, _, fft, route = cells(end_table(rows))
    task1 = ["80.0% ±0.0%", "10.0%", "40.0%", "20.0%", "100.0%"]
    assert fft == [
        "Full fine-tuning",
        "1,234,567",
        "0.003",
        "15.0% ±7.1%",
        "90.0%",
        "7.5%",
        "3.8%",
        "100.0%",
        *task1,
    ]
    assert route[3:5] == ["70.0%", "90.0%"]
    label = "Full fine-tuning"
    route = ["SCALE-Route", "0.003", "70.0%", "80.0%"]
    tried = [
        [label, "0.003", "10.0%", "80.0%"],
        [label, "0.5", "50.0%", "80.0%"],
        route,
        [label, "0.5", "diverged"],
    ]
    assert cells(rates_table(rows))[2:] == tried
    other = {"label": "LoRA", "steps": 1, "roles": {"korean": "new"}, "before": {}, "after": {}}
    (summary / "summary.json").write_text(json.dumps([other]))
    with pytest.raises(
        DataError, match="expected the corpora of a study of biographies, found none called task0_"
    ):
        show.read_summary(summary)
