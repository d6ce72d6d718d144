"""The files of the study: biographies to pretrain on, and questions about some of these people and about others.

OUTPUT/biographies.jsonl            {"text": ...}, five of each of the first half of all people
OUTPUT/task0/<attribute>.jsonl      {"prompt": ..., "answer": ...} about the first quarter
OUTPUT/task1/<attribute>.jsonl      about the last tenth, of whom there is no biography
OUTPUT/tokenizer/                   trained on all of it
OUTPUT/people.jsonl                 who is who, written last
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.biography.people import ATTRIBUTES, Person, make_people
from pipeline.biography.pools import make_pools
from pipeline.biography.texts import biographies, question
from pipeline.biography.tokenizer import train_tokenizer
from pipeline.errors import DataError
from pipeline.files import published_folder

# Of 200,000 people 100,000 have biographies, 50,000 of these are Task 0's, and 20,000 of the others Task 1's.
_PRETRAINED, _TASK0, _TASK1 = 0.5, 0.25, 0.1
_FEWEST = 20
_MADE_OF = "made_of.json"


@dataclass(frozen=True)
class Roster:
    """Who is written of, and who is asked about. `task0` are some of the pretrained; `task1` are none of them."""

    pretrained: Sequence[Person]
    task0: Sequence[Person]
    task1: Sequence[Person]


def make_roster(people: int, *, pool_fraction: float, seed: int) -> Roster:
    """The people of a study, in the paper's proportions.

    Raises:
        DataError: there are too few for the proportions, or too many for the names.
    """
    if people < _FEWEST:
        raise DataError(f"--people: expected {_FEWEST} or more, of whom a tenth is Task 1's, found {people}")
    everyone = make_people(people, make_pools(pool_fraction), seed)
    return Roster(
        pretrained=everyone[: round(people * _PRETRAINED)],
        task0=everyone[: round(people * _TASK0)],
        task1=everyone[people - round(people * _TASK1) :],
    )


def write_corpora(output: Path, people: int, *, pool_fraction: float, seed: int, vocab_size: int) -> Roster:
    """Writes the files; the same arguments give the same bytes. Where `output` holds them already, nothing is written.

    Raises:
        DataError: `output` holds those of other arguments, or these cannot be.
    """
    roster = make_roster(people, pool_fraction=pool_fraction, seed=seed)
    made_of = {"people": people, "pool_fraction": pool_fraction, "seed": seed, "vocab_size": vocab_size}
    if output.exists():
        _check_same(output, made_of)
        return roster
    texts = [text for person in roster.pretrained for text in biographies(person, seed)]
    random.Random(seed).shuffle(texts)
    tasks = {"task0": roster.task0, "task1": roster.task1}
    with published_folder(output) as folder:
        _write(folder / "biographies.jsonl", ({"text": text} for text in texts))
        for task, attribute in ((task, attribute) for task in tasks for attribute in ATTRIBUTES):
            (folder / task).mkdir(exist_ok=True)
            _write(folder / task / f"{attribute}.jsonl", (question(person, attribute) for person in tasks[task]))
        (folder / "tokenizer").mkdir()
        train_tokenizer([*texts, *_questions(tasks.values())], vocab_size, folder / "tokenizer")
        groups = {"pretrained": roster.pretrained, "task1": roster.task1}
        _write(folder / "people.jsonl", ({"group": name, **asdict(one)} for name in groups for one in groups[name]))
        (folder / _MADE_OF).write_text(json.dumps(made_of) + "\n", encoding="utf-8")
    return roster


def _check_same(output: Path, made_of: dict[str, Any]) -> None:
    path = output / _MADE_OF
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else "something else"
    if found != made_of:
        raise DataError(f"{output}: expected the biographies of {made_of}, found {found}; name another --output")


def _questions(groups: Iterable[Sequence[Person]]) -> Iterator[str]:
    for people in groups:
        for person in people:
            for attribute in ATTRIBUTES:
                asked = question(person, attribute)
                yield asked["prompt"] + asked["answer"]


def _write(path: Path, records: Iterable[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
