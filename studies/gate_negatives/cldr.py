"""Texts in some 250 languages, of the names and patterns of Unicode's CLDR, as Babel carries it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta

from babel import Locale, localedata
from babel.dates import format_date, format_timedelta
from babel.lists import format_list
from babel.numbers import UnsupportedNumberingSystemError, format_currency, format_decimal
from babel.units import format_unit

from studies.gate_negatives.records import Record, generator, joined

CHARACTERS = 1500
"""How many characters a language has from here at most."""
LEAST_NAMES = 30
"""Languages with fewer names of their own are left out: the rest is inherited, from English."""
_UNITS = (
    "length-kilometer",
    "mass-kilogram",
    "duration-hour",
    "duration-year",
    "temperature-celsius",
    "speed-kilometer-per-hour",
    "area-square-meter",
    "volume-liter",
)


def cldr_records() -> Iterator[Record]:
    """The records of all languages that CLDR has enough of."""
    for identifier in sorted(localedata.locale_identifiers()):
        own = localedata.load(identifier, merge_inherited=False)
        names = _names(own)
        is_variant = "_" in identifier and len(identifier.split("_")[-1]) != 4
        if is_variant or len(names) < LEAST_NAMES:
            # `de_AT` is German, and `kw` has months alone.
            continue
        # A list in YAML reads `no` as false.
        kind = "nb" if identifier == "no" else identifier.replace("_", "-")
        rng = generator(f"cldr {kind}")
        pieces = [*names, *_sentences(Locale.parse(identifier), names, own, rng)]
        for text in joined(pieces, _separator(own), CHARACTERS, rng):
            yield Record(kind, text)


def _names(own: dict[str, dict[str, str]]) -> list[str]:
    """The names of regions and languages that a locale has itself."""
    names: list[str] = []
    for table in ("territories", "languages"):
        for name in own.get(table, {}).values():
            if len(name) > 3:
                names.append(name)
    return names


def _separator(own: dict[str, dict[str, str]]) -> str:
    """What stands between two sentences: a full stop of the script and a space."""
    sample = "".join(own.get("territories", own.get("languages", {})).values())
    if any("\u0900" <= character <= "\u0d7f" for character in sample):
        return "\u0964 "
    if any(
        "\u3040" <= character <= "\u30ff" or "\u4e00" <= character <= "\u9fff"
        for character in sample
    ):
        return "\u3002"
    return ". "


def _sentences(
    locale: Locale, names: list[str], own: dict[str, dict[str, str]], rng: random.Random
) -> list[str]:
    """Lists of names, dates, durations and amounts, as the language writes them."""

    def some_list() -> str:
        return format_list([*rng.sample(names, rng.randint(2, 4))], locale=locale)

    def some_date() -> str:
        day = date(1950, 1, 1) + timedelta(days=rng.randrange(40_000))
        return format_date(day, rng.choice(["full", "long"]), locale=locale)

    def some_time() -> str:
        span = timedelta(hours=rng.choice([-1, 1]) * rng.randrange(1, 50_000))
        return format_timedelta(span, add_direction=True, threshold=1.2, locale=locale)

    def some_unit() -> str:
        return format_unit(rng.randrange(1, 3000), rng.choice(_UNITS), locale=locale)

    def some_price() -> str:
        code = rng.choice(["EUR", "USD", "CHF", "INR", "BRL", "CAD"])
        return format_currency(
            rng.randrange(1, 10**6) / 10, code, locale=locale, format_type="name"
        )

    def some_number() -> str:
        return format_decimal(rng.randrange(10**7) / 100, locale=locale)

    # What the language has itself: an inherited pattern would be English.
    made_by: list[tuple[Callable[[], str], str, int]] = [
        (some_list, "territories", 12),
        (some_date, "months", 10),
        (some_time, "date_fields", 8),
        (some_unit, "unit_patterns", 8),
        (some_price, "currency_names", 5),
        (some_number, "number_symbols", 2),
    ]
    sentences: list[str] = []
    for make, table, count in made_by:
        if own.get(table):
            sentences += _made(make, count)
    return sentences


def _made(make: Callable[[], str], count: int) -> list[str]:
    """`count` texts of `make`; none of a locale that lacks a pattern which Babel asks for."""
    texts: list[str] = []
    for _ in range(count):
        try:
            texts.append(make())
        except (KeyError, AttributeError, ValueError, UnsupportedNumberingSystemError):
            return []
    return texts
