"""The texts of the biography study: sizes and proportions as in the paper, reproducible, with different names."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import DataError
from pipeline.experiments.biography import (
    ATTRIBUTES,
    BIOGRAPHIES,
    DAYS,
    MONTHS,
    QUESTIONS,
    SENTENCES,
    YEARS,
    biographies,
    make_people,
    make_pools,
    make_roster,
    question,
    write_corpora,
)
from tests.data.helpers import contents
from tests.experiments.studies import call_tool


def test_the_pools_have_the_papers_sizes_and_nothing_twice():
    pools = make_pools()
    names = (pools.first_names, pools.middle_names, pools.last_names)
    rest = (pools.cities, pools.universities, pools.majors, pools.companies)
    assert [len(pool) for pool in (*names, *rest)] == [400, 400, 1000, 200, 300, 100, 263]
    for pool in (*names, *rest):
        assert len(set(pool)) == len(pool)
    assert all(re.fullmatch(r"[A-Z][a-z]+", name) for pool in names for name in pool)
    assert all(re.fullmatch(r"[A-Z][a-z]+, [A-Z]{2}", city) for city in pools.cities)
    assert len(set(pools.company_cities)) == 200, "a city without a company"


@given(st.floats(0.001, 1.0))
def test_a_fraction_of_the_pools_keeps_their_proportions(fraction: float):
    whole, some = make_pools(), make_pools(fraction)
    for name in ("first_names", "middle_names", "last_names", "cities", "universities", "majors", "companies"):
        of_whole, of_some = getattr(whole, name), getattr(some, name)
        assert len(of_some) == max(2, round(fraction * len(of_whole)))
        assert len(set(of_some)) == len(of_some)
        assert set(of_some) <= set(of_whole)


@settings(max_examples=20)
@given(st.integers(20, 400), st.integers(0, 2**32))
def test_people_have_the_papers_proportions(count: int, seed: int):
    roster = make_roster(count, pool_fraction=0.05, seed=seed)
    assert [len(group) for group in (roster.pretrained, roster.task0, roster.task1)] == [
        round(count / 2),
        round(count / 4),
        round(count / 10),
    ]
    assert roster.task0 == roster.pretrained[: len(roster.task0)]
    names = [person.name for person in (*roster.pretrained, *roster.task1)]
    assert len(set(names)) == len(names), "Task 1's people have biographies, or share a name"
    assert roster == make_roster(count, pool_fraction=0.05, seed=seed)


def test_another_seed_gives_other_people():
    pools = make_pools()
    ours, others = (make_people(500, pools, seed) for seed in (0, 1))
    assert {person.name for person in ours} != {person.name for person in others}
    assert make_people(100, pools, 0) != make_people(500, pools, 0)[100:200]


def test_every_attribute_takes_all_its_values_and_the_company_fixes_the_city():
    pools = make_pools()
    people = make_people(20_000, pools, 3)
    assert {person.birth_city for person in people} == set(pools.cities)
    assert {person.university for person in people} == set(pools.universities)
    assert {person.major for person in people} == set(pools.majors)
    city_of = dict(zip(pools.companies, pools.company_cities, strict=True))
    assert all(person.company_city == city_of[person.company] for person in people)
    assert {person.company for person in people} == set(city_of)
    dates = [re.fullmatch(r"(\w+) (\d+), (\d+)", person.birthday).groups() for person in people]
    assert {month for month, _, _ in dates} == set(MONTHS)
    assert {int(day) for _, day, _ in dates} == set(range(DAYS[0], DAYS[1] + 1))
    assert {int(year) for _, _, year in dates} == set(range(YEARS[0], YEARS[1] + 1))
    assert max(Counter(person.major for person in people).values()) < 2 * 20_000 / 100


def test_biographies_state_every_fact_with_the_full_name_in_varying_order():
    (person,) = make_people(1, make_pools(), 0)
    texts = biographies(person, 0)
    assert texts == biographies(person, 0) != biographies(person, 1)
    assert len(texts) == len(set(texts)) == BIOGRAPHIES
    for text in texts:
        assert text.count(person.name) == len(ATTRIBUTES)
        assert all(getattr(person, attribute) in text for attribute in ATTRIBUTES)
    assert len({text.index(person.birthday) for text in texts}) > 1
    assert set(SENTENCES) == set(QUESTIONS) == set(ATTRIBUTES)
    assert all(
        "{name}" in sentence and f"{{{key}}}" in sentence for key, some in SENTENCES.items() for sentence in some
    )


def test_a_question_names_the_person_and_its_answer_starts_with_a_space():
    (person,) = make_people(1, make_pools(), 0)
    for attribute in ATTRIBUTES:
        asked = question(person, attribute)
        assert asked["prompt"].endswith("?\nAnswer:")
        assert person.name in asked["prompt"]
        assert asked["answer"] == " " + getattr(person, attribute)


def test_the_files_are_reproducible_and_not_overwritten(tmp_path: Path):
    arguments = {"pool_fraction": 0.05, "seed": 5, "vocab_size": 400}
    roster = write_corpora(tmp_path / "a", 40, **arguments)
    write_corpora(tmp_path / "b", 40, **arguments)
    assert [*contents(tmp_path / "a").values()] == [*contents(tmp_path / "b").values()]
    texts = [json.loads(line)["text"] for line in (tmp_path / "a" / "biographies.jsonl").read_text().splitlines()]
    assert sorted(texts) == sorted(text for person in roster.pretrained for text in biographies(person, 5))
    asked = (tmp_path / "a" / "task1" / "major.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in asked] == [question(person, "major") for person in roster.task1]
    assert not [person.name for person in roster.task1 if person.name in " ".join(texts)]

    tokenizer = load_tokenizer(tmp_path / "a" / "tokenizer")
    assert tokenizer.vocab_size == 400
    assert (tokenizer.document_start, tokenizer.document_end) == ((), (0,))
    assert tokenizer.decode(tokenizer.reference.encode([texts[0]]).ids) == texts[0]

    before = contents(tmp_path / "a")
    assert write_corpora(tmp_path / "a", 40, **arguments) == roster
    with pytest.raises(
        DataError, match=r"expected the biographies of .*'seed': 6.*, found .*'seed': 5.*choose another --output"
    ):
        write_corpora(tmp_path / "a", 40, **{**arguments, "seed": 6})
    assert contents(tmp_path / "a") == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--people", "10"], "--people: expected 20 or more"),
        (["--people", "2000", "--pool-fraction", "0.001"], "--people: 2000 people need as many names"),
        (["--pool-fraction", "2"], "--pool-fraction: expected a number above 0 and at most 1, found 2.0"),
    ],
)
def test_impossible_arguments_are_an_error_of_one_line(tmp_path: Path, arguments: list[str], said: str, monkeypatch):
    with pytest.raises(DataError, match=f"^{said}") as raised:
        call_tool(monkeypatch, "make_biographies", *arguments, "--output", tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_the_command_line_makes_the_texts(tmp_path: Path, monkeypatch, capsys):
    size = ["--people", "40", "--pool-fraction", "0.05", "--vocab-size", "400", "--seed", "5"]
    call_tool(monkeypatch, "make_biographies", *size, "--output", tmp_path / "texts")
    assert capsys.readouterr().out == f"{tmp_path}/texts: 20 pretrained, 10 of them Task 0's, 4 Task 1's\n"
    people = [json.loads(line) for line in (tmp_path / "texts" / "people.jsonl").read_text().splitlines()]
    assert Counter(person["group"] for person in people) == {"pretrained": 20, "task1": 4}
