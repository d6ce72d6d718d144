"""What is written of people, and what is asked about them."""

from __future__ import annotations

import random
from dataclasses import asdict

from pipeline.biography.people import ATTRIBUTES, Person

BIOGRAPHIES = 5
"""Of each person."""

SENTENCES = {
    "birthday": (
        "{name} was born on {birthday}.",
        "The birthday of {name} is {birthday}.",
        "{name} came into the world on {birthday}.",
        "On the birth certificate of {name} one reads {birthday}.",
        "The life of {name} began on {birthday}.",
    ),
    "birth_city": (
        "{name} is a native of {birth_city}.",
        "The parents of {name} lived in {birth_city} at the time of the birth.",
        "{name} first saw the light of day in {birth_city}.",
        "The home town of {name} is {birth_city}.",
        "The cradle of {name} stood in {birth_city}.",
    ),
    "university": (
        "{name} graduated from {university}.",
        "The degree of {name} was awarded by {university}.",
        "{name} spent the student years at {university}.",
        "The teachers of {name} were those of {university}.",
        "{name} is an alumnus of {university}.",
    ),
    "major": (
        "{name} majored in {major}.",
        "The field that {name} studied is {major}.",
        "{name} holds a degree in {major}.",
        "The subject of {name} was {major}.",
        "{name} chose to specialise in {major}.",
    ),
    "company": (
        "{name} is employed by {company}.",
        "The employer of {name} is {company}.",
        "{name} earns a living at {company}.",
        "The career of {name} led to {company}.",
        "{name} has a post at {company}.",
    ),
    "company_city": (
        "{name} works in {company_city}.",
        "The office of {name} is in {company_city}.",
        "Every morning {name} goes to work in {company_city}.",
        "The desk of {name} stands in {company_city}.",
        "The working days of {name} pass in {company_city}.",
    ),
}

QUESTIONS = {
    "birthday": "What is the birth date of {name}?",
    "birth_city": "What is the birth city of {name}?",
    "university": "Which university did {name} attend?",
    "major": "What was the major of {name}?",
    "company": "Which company does {name} work for?",
    "company_city": "In which city does {name} work?",
}


def biographies(person: Person, seed: int) -> list[str]:
    """Five texts on one person: each has a sentence on every attribute, in an order and a wording of its own."""
    choice = random.Random(f"{seed} {person.name}")
    return [_biography(person, choice) for _ in range(BIOGRAPHIES)]


def _biography(person: Person, choice: random.Random) -> str:
    order = choice.sample(ATTRIBUTES, len(ATTRIBUTES))
    return " ".join(choice.choice(SENTENCES[attribute]).format_map(asdict(person)) for attribute in order)


def question(person: Person, attribute: str) -> dict[str, str]:
    """A record of a prompt and its answer, which begins with a space."""
    return {
        "prompt": QUESTIONS[attribute].format(name=person.name) + "\nAnswer:",
        "answer": " " + str(getattr(person, attribute)),
    }
