"""What people may be called, and where they may live, learn and work. Made of parts: all is readable, and none real.

As many of each as Zheng et al. (2025) have: 400 first, 400 middle and 1000 last names, 200 cities, 300 universities,
100 majors, 263 companies, each in one city.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from pipeline.errors import DataError

# Every beginning goes with every end.
_FIRST = (
    "Al Bel Cor Dar El Fen Gal Hal Is Jor Kel Lor Mar Nor Or Per Ros Sal Tam Vin",
    "a an ara as en ena eth ia ian ic in ina is ita o on ora ric us yn",
)
_MIDDLE = (
    "Ad Ber Cal Den Ed Fran Ger Hen Ing Jas Kar Lin Mil Nat Ol Pat Quin Rem Ser Wil",
    "a ald ard e el elle er ette i ine is ley man mond na or ra rick ton win",
)
_LAST = (
    "Ash Barn Birch Brad Broad Brook Clay Cold Cran Dal East Elm Fair Glen Gold Gran Green Hale Hart Hazel Hol Kirk "
    "Lang Long Lynd Mill Nether Oak Pem Quar Rad Rose Sand Shel Stan Stone Thorn Wake West Whit",
    "beck berg bourne bridge burn by croft dale den field ford gate grave ham house land ley low man more shaw stead "
    "wall well wick",
)
_CITY = (
    "Alder Bay Cedar Clear Eagle Fox Grand Iron Lake Maple North Pine River Silver Spring",
    "bluff burg port dale field ford haven mont mouth point side ton view ville",
)
_STATES = (
    "AL AK AZ AR CA CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM NY NC ND OH OK OR PA "
    "RI SC SD TN TX UT VT VA WA WV WI WY"
)
_UNIVERSITY_PLACE = (
    "Abbots Arden Bellmere Carrow Dunmore Eskdale Farleigh Garston Harrow Ives Jarrow Kelso Lowther Marlow Norwood "
    "Orford Penrith Quorn Ridley Selby Tarvin Ulver Varley Wenlock Yarrow"
)
_UNIVERSITY_SIDES = ("", " East", " West")
_UNIVERSITY_FORMS = ("{} University", "University of {}", "{} Institute of Technology", "{} College")
_MAJOR = (
    "Applied Clinical Comparative Digital Experimental General Global Industrial Modern Theoretical",
    "Biology Chemistry Design Economics Geography History Law Linguistics Music Physics",
)
_COMPANY = (
    "Acorn Aster Beacon Bolt Borealis Cobalt Comet Copper Delta Ember Falcon Flint Garnet Harbor Helix Indigo Juniper "
    "Kestrel Lantern Lotus Magnet Meridian Nimbus Nova Onyx Orchid Pioneer Quartz Raven Sable Summit Talon Umber "
    "Vertex Willow Zephyr",
    "Analytics Foods Freight Energy Labs Motors Robotics Textiles",
)


@dataclass(frozen=True)
class Pools:
    """The values there are. Company number i is in the city `company_cities[i]`, always."""

    first_names: Sequence[str]
    middle_names: Sequence[str]
    last_names: Sequence[str]
    cities: Sequence[str]
    universities: Sequence[str]
    majors: Sequence[str]
    companies: Sequence[str]
    company_cities: Sequence[str]

    @property
    def full_names(self) -> int:
        """How many there can be."""
        return len(self.first_names) * len(self.middle_names) * len(self.last_names)


def make_pools(fraction: float = 1.0) -> Pools:
    """The pools, or of each the same fraction, at least two.

    Raises:
        DataError: the fraction is not above 0 and at most 1.
    """
    if not 0 < fraction <= 1:
        raise DataError(f"--pool-fraction: expected a number above 0 and at most 1, found {fraction}")

    def some(values: Sequence[str], size: int) -> list[str]:
        wanted = max(2, round(size * fraction))
        # In an order of chance, always the same: neighbours have parts in common.
        return random.Random(size).sample(values, len(values))[:wanted]

    states = _STATES.split()
    cities = some([f"{city}, {states[at % len(states)]}" for at, city in enumerate(_joined(*_CITY))], 200)
    places = product(_UNIVERSITY_PLACE.split(), _UNIVERSITY_SIDES, _UNIVERSITY_FORMS)
    companies = some(list(_joined(*_COMPANY, between=" ")), 263)
    return Pools(
        first_names=some(list(_joined(*_FIRST)), 400),
        middle_names=some(list(_joined(*_MIDDLE)), 400),
        last_names=some(list(_joined(*_LAST)), 1000),
        cities=cities,
        universities=some([form.format(place + side) for place, side, form in places], 300),
        majors=some(list(_joined(*_MAJOR, between=" ")), 100),
        companies=companies,
        # Every city has companies, one or two, where there are as many of either as the paper has.
        company_cities=[cities[at % len(cities)] for at in range(len(companies))],
    )


def _joined(beginnings: str, ends: str, between: str = "") -> Iterator[str]:
    return (beginning + between + end for beginning, end in product(beginnings.split(), ends.split()))
