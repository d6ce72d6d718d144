"""People, each with a name of their own and six attributes, drawn with a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pipeline.biography.pools import Pools
from pipeline.errors import DataError

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
YEARS = (1900, 2099)
DAYS = (1, 28)

ATTRIBUTES = ("birthday", "birth_city", "university", "major", "company", "company_city")
"""The last one follows from the one before it."""


@dataclass(frozen=True)
class Person:
    """Someone who never was."""

    name: str
    birthday: str
    birth_city: str
    university: str
    major: str
    company: str
    company_city: str


def make_people(count: int, pools: Pools, seed: int) -> list[Person]:
    """So many people, no two with the same full name: the same ones for the same arguments.

    Raises:
        DataError: the pools have not so many full names.
    """
    if count > pools.full_names:
        raise DataError(
            f"--people: {count} people need as many names, but these pools have {pools.full_names}; "
            "ask for fewer, or raise --pool-fraction"
        )
    choice = random.Random(seed)
    return [_person(number, pools, choice) for number in choice.sample(range(pools.full_names), count)]


def _person(number: int, pools: Pools, choice: random.Random) -> Person:
    """The person with the `number`-th of all full names."""
    number, last = divmod(number, len(pools.last_names))
    first, middle = divmod(number, len(pools.middle_names))
    company = choice.randrange(len(pools.companies))
    return Person(
        name=f"{pools.first_names[first]} {pools.middle_names[middle]} {pools.last_names[last]}",
        birthday=f"{choice.choice(MONTHS)} {choice.randint(*DAYS)}, {choice.randint(*YEARS)}",
        birth_city=choice.choice(pools.cities),
        university=choice.choice(pools.universities),
        major=choice.choice(pools.majors),
        company=pools.companies[company],
        company_city=pools.company_cities[company],
    )
