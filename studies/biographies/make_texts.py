r"""Makes the texts of the biography study: people, biographies of them, questions, and a tokenizer.

    python -m studies.biographies.make_texts --people 4000 --pool-fraction 0.1 \
        --output runs/biography/texts

The same arguments give the same bytes:

    OUTPUT/biographies.jsonl            {"text": ...}, five of each of the first half of all people
    OUTPUT/task0/<attribute>.jsonl      {"prompt": ..., "answer": ...} about the first quarter
    OUTPUT/task1/<attribute>.jsonl      about the last tenth, who have no biographies
    OUTPUT/tokenizer/                   trained on all of these texts
    OUTPUT/people.jsonl                 all people with their attributes

Of 200,000 people, as in the paper, 100,000 have biographies, 50,000 of these are in Task 0, 20,000
others in Task 1. The pools are as large as those of Zheng et al. (2025): 400 first, 400 middle and
1000 last names, 200 cities, 300 universities, 100 majors, 263 companies, each in one city. Their
values are combined from parts, and none is real.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline import command_line
from pipeline.errors import DataError
from pipeline.files.folders import published_folder
from pipeline.files.json_files import read_object, write_json
from pipeline.files.publishing import write_text

# Every first part is combined with every second part.
_FIRST = (
    "Al Bel Cor Dar El Fen Gal Hal Is Jor Kel Lor Mar Nor Or Per Ros Sal Tam Vin",
    "a an ara as en ena eth ia ian ic in ina is ita o on ora ric us yn",
)
_MIDDLE = (
    "Ad Ber Cal Den Ed Fran Ger Hen Ing Jas Kar Lin Mil Nat Ol Pat Quin Rem Ser Wil",
    "a ald ard e el elle er ette i ine is ley man mond na or ra rick ton win",
)
_LAST = (
    "Ash Barn Birch Brad Broad Brook Clay Cold Cran Dal East Elm Fair Glen Gold Gran Green Hale "
    "Hart Hazel Hol Kirk Lang Long Lynd Mill Nether Oak Pem Quar Rad Rose Sand Shel Stan Stone "
    "Thorn Wake West Whit",
    "beck berg bourne bridge burn by croft dale den field ford gate grave ham house land ley low "
    "man more shaw stead wall well wick",
)
_CITY = (
    "Alder Bay Cedar Clear Eagle Fox Grand Iron Lake Maple North Pine River Silver Spring",
    "bluff burg port dale field ford haven mont mouth point side ton view ville",
)
_STATES = (
    "AL AK AZ AR CA CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM "
    "NY NC ND OH OK OR PA RI SC SD TN TX UT VT VA WA WV WI WY"
)
_UNIVERSITY_PLACE = (
    "Abbots Arden Bellmere Carrow Dunmore Eskdale Farleigh Garston Harrow Ives Jarrow Kelso "
    "Lowther Marlow Norwood Orford Penrith Quorn Ridley Selby Tarvin Ulver Varley Wenlock Yarrow"
)
_UNIVERSITY_SIDES = ("", " East", " West")
_UNIVERSITY_FORMS = (
    "{} University",
    "University of {}",
    "{} Institute of Technology",
    "{} College",
)
_MAJOR = (
    "Applied Clinical Comparative Digital Experimental General Global Industrial Modern "
    "Theoretical",
    "Biology Chemistry Design Economics Geography History Law Linguistics Music Physics",
)
_COMPANY = (
    "Acorn Aster Beacon Bolt Borealis Cobalt Comet Copper Delta Ember Falcon Flint Garnet Harbor "
    "Helix Indigo Juniper Kestrel Lantern Lotus Magnet Meridian Nimbus Nova Onyx Orchid Pioneer "
    "Quartz Raven Sable Summit Talon Umber Vertex Willow Zephyr",
    "Analytics Foods Freight Energy Labs Motors Robotics Textiles",
)


@dataclass(frozen=True)
class Pools:
    """All values. Company number i is in the city `company_cities[i]`."""

    first_names: Sequence[str]
    middle_names: Sequence[str]
    last_names: Sequence[str]
    cities: Sequence[str]
    universities: Sequence[str]
    majors: Sequence[str]
    companies: Sequence[str]
    company_cities: Sequence[str]


def make_pools(fraction: float = 1.0) -> Pools:
    """The pools, reduced to a fraction of their sizes, but at least two values each.

    Raises:
        DataError: the fraction is not above 0 and at most 1.
    """
    if not 0 < fraction <= 1:
        raise DataError(
            f"--pool-fraction: expected a number above 0 and at most 1, found {fraction}"
        )

    def some(values: Sequence[str], size: int) -> list[str]:
        wanted = max(2, round(size * fraction))
        # Shuffled, always in the same way, because neighbours have parts in common.
        return random.Random(size).sample(values, len(values))[:wanted]

    cities = some(_all_cities(), 200)
    companies = some(_joined(*_COMPANY, between=" "), 263)
    # At full size, every city has one or two companies.
    company_cities = [cities[number % len(cities)] for number in range(len(companies))]
    return Pools(
        first_names=some(_joined(*_FIRST), 400),
        middle_names=some(_joined(*_MIDDLE), 400),
        last_names=some(_joined(*_LAST), 1000),
        cities=cities,
        universities=some(_all_universities(), 300),
        majors=some(_joined(*_MAJOR, between=" "), 100),
        companies=companies,
        company_cities=company_cities,
    )


def _all_cities() -> list[str]:
    # The state is part of the name, and follows from it.
    states = _STATES.split()
    cities: list[str] = []
    for number, city in enumerate(_joined(*_CITY)):
        cities.append(f"{city}, {states[number % len(states)]}")
    return cities


def _all_universities() -> list[str]:
    universities: list[str] = []
    for place in _UNIVERSITY_PLACE.split():
        for side in _UNIVERSITY_SIDES:
            for form in _UNIVERSITY_FORMS:
                universities.append(form.format(place + side))
    return universities


def _joined(firsts: str, seconds: str, between: str = "") -> list[str]:
    """Every first part with every second part."""
    names: list[str] = []
    for first in firsts.split():
        for second in seconds.split():
            names.append(first + between + second)
    return names


MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
YEARS = (1900, 2099)
DAYS = (1, 28)

ATTRIBUTES = ("birthday", "birth_city", "university", "major", "company", "company_city")
"""The company determines the company's city."""
TASKS = ("task0", "task1")


@dataclass(frozen=True)
class Person:
    """An invented person."""

    name: str
    birthday: str
    birth_city: str
    university: str
    major: str
    company: str
    company_city: str


def make_people(count: int, pools: Pools, seed: int) -> list[Person]:
    """`count` people with different full names; the same arguments give the same people.

    Raises:
        DataError: the pools have fewer full names.
    """
    names = len(pools.first_names) * len(pools.middle_names) * len(pools.last_names)
    if count > names:
        raise DataError(
            f"--people: {count} people need as many names, but these pools have {names}; "
            "ask for fewer, or raise --pool-fraction"
        )
    choice = random.Random(seed)
    people: list[Person] = []
    # A number stands for a full name: all names need not be made, and none is drawn twice.
    for number in choice.sample(range(names), count):
        people.append(_person(number, pools, choice))
    return people


def _person(number: int, pools: Pools, choice: random.Random) -> Person:
    """A person with the `number`-th of all full names."""
    # The digits of a number in which the last name changes first, and the first name last.
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


BIOGRAPHIES = 5
"""per person"""

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
    """Five texts about one person, each with a sentence on every attribute.

    Order and wording are random.
    """
    # A generator for each person: the texts do not depend on who else there is.
    choice = random.Random(f"{seed} {person.name}")
    values = asdict(person)
    texts: list[str] = []
    for _ in range(BIOGRAPHIES):
        sentences: list[str] = []
        for attribute in choice.sample(ATTRIBUTES, len(ATTRIBUTES)):
            sentence = choice.choice(SENTENCES[attribute])
            sentences.append(sentence.format_map(values))
        texts.append(" ".join(sentences))
    return texts


def question(person: Person, attribute: str) -> dict[str, str]:
    """A record of `prompt` and `answer`; the answer starts with a space."""
    return {
        "prompt": QUESTIONS[attribute].format(name=person.name) + "\nAnswer:",
        "answer": " " + str(getattr(person, attribute)),
    }


END_OF_DOCUMENT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Trains a tokenizer like Pythia's, byte-level BPE without a start token.

    Writes it into `folder` in Hugging Face's format.
    """
    tokenizer = Tokenizer(models.BPE())
    # Without a space before the text: an answer, which starts with one, is then tokenized as it is
    # within a text.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        # All 256 bytes, so that no text is without tokens.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    write_json(folder / "tokenizer_config.json", settings)


# Shares of all people.
_PRETRAINED = 0.5
_TASK0 = 0.25
_TASK1 = 0.1
_FEWEST = 20
_MADE_OF = "made_of.json"

Roster = dict[str, list[Person]]
"""The people with biographies, `pretrained`, and those of the tasks.

Those of `task0` have biographies, those of `task1` have none.
"""


def make_roster(people: int, *, pool_fraction: float, seed: int) -> Roster:
    """The people of a study, in the paper's proportions.

    Raises:
        DataError: too few for the proportions, or too many for the pools.
    """
    if people < _FEWEST:
        raise DataError(
            f"--people: expected {_FEWEST} or more, of whom a tenth is Task 1's, found {people}"
        )
    everyone = make_people(people, make_pools(pool_fraction), seed)
    return {
        "pretrained": everyone[: round(people * _PRETRAINED)],
        "task0": everyone[: round(people * _TASK0)],
        "task1": everyone[people - round(people * _TASK1) :],
    }


def write_corpora(
    output: Path, people: int, *, pool_fraction: float, seed: int, vocab_size: int
) -> dict[str, list[Person]]:
    """Writes the files, unless `output` holds them already; the same arguments give the same bytes.

    Raises:
        OutputError: `output` holds something else.
        DataError: `output` holds the files of other arguments, or there are too few or too many
            people.
    """
    roster = make_roster(people, pool_fraction=pool_fraction, seed=seed)
    made_of = {
        "people": people,
        "pool_fraction": pool_fraction,
        "seed": seed,
        "vocab_size": vocab_size,
    }
    path = output / _MADE_OF
    if path.exists():
        found = read_object(path, DataError, "choose another --output")
        if found != made_of:
            raise DataError(
                f"{output}: expected the biographies of {made_of}, found {found}; choose another "
                "--output"
            )
        return roster
    texts: list[str] = []
    for person in roster["pretrained"]:
        texts += biographies(person, seed)
    # Otherwise the five texts of a person would follow each other.
    random.Random(seed).shuffle(texts)
    with published_folder(output, None) as folder:
        _write(folder / "biographies.jsonl", [{"text": text} for text in texts])
        for task in TASKS:
            (folder / task).mkdir()
            for attribute in ATTRIBUTES:
                questions = [question(person, attribute) for person in roster[task]]
                _write(folder / task / f"{attribute}.jsonl", questions)
        (folder / "tokenizer").mkdir()
        # With the questions: those of Task 1 have names that no biography has.
        train_tokenizer([*texts, *_answered(roster)], vocab_size, folder / "tokenizer")
        # The people of Task 0 are among the pretrained.
        people_and_groups: list[dict[str, str]] = []
        for name in ("pretrained", "task1"):
            for person in roster[name]:
                people_and_groups.append({"group": name, **asdict(person)})
        _write(folder / "people.jsonl", people_and_groups)
        (folder / _MADE_OF).write_text(json.dumps(made_of) + "\n", encoding="utf-8")
    return roster


def _answered(roster: Roster) -> Iterator[str]:
    """All questions of both tasks with their answers, by person."""
    for task in TASKS:
        for person in roster[task]:
            for attribute in ATTRIBUTES:
                record = question(person, attribute)
                yield record["prompt"] + record["answer"]


def _write(path: Path, records: Iterable[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="the folder to write")
    add(
        "--people",
        type=int,
        default=200_000,
        help="the number of people; half have biographies, a tenth are in Task 1 (default 200,000)",
    )
    add(
        "--pool-fraction",
        type=float,
        default=1.0,
        help="how much of each pool of names and places is used (default 1)",
    )
    add(
        "--vocab-size",
        type=int,
        default=8192,
        help="the vocabulary size of the tokenizer, which is trained on the texts (default 8192)",
    )
    add("--seed", type=int, default=0, help="the seed of the people and the texts (default 0)")
    options = parser.parse_args()
    roster = write_corpora(
        options.output,
        options.people,
        pool_fraction=options.pool_fraction,
        seed=options.seed,
        vocab_size=options.vocab_size,
    )
    print(
        f"{options.output}: {len(roster['pretrained']):,} pretrained, "
        f"{len(roster['task0']):,} of them Task 0's, {len(roster['task1']):,} Task 1's"
    )


if __name__ == "__main__":
    command_line.run(main)
