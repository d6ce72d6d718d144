"""What a report says of runs: by method, and how far each moved from its base."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeline.run_folder.metrics import Figures, geometric_mean, mean
from studies.report.formats import MINUS, change, listed
from studies.report.results import REPLAY, Row

_MAX_CORPORA = 3  # of a role; more are shown together
METHODS = ("fft", "freeze", "lora", "llama_pro", "preserve", "adapt", "route")
"""The position is the style's number."""


class Standing(NamedTuple):
    """How far a run moved from its base: to the better on the new corpora, to the worse on the replayed ones."""

    learned: float
    forgotten: float


def on_frontier(place: Standing, named: Sequence[tuple[str, Standing]]) -> bool:
    """Whether no other both learned at least as much and forgot no more."""
    return not any(
        to.learned >= place.learned and to.forgotten <= place.forgotten and to != place
        for _, to in named
    )


@dataclass(frozen=True)
class Measure:
    """A figure of every corpus, as a distance from the base's value.

    `distance` compares a value with the base's; better values are above 0 where `better` is 1, below 0 where it is −1.
    `words` writes a distance, as `on_new` and `on_kept` do of what was learned and forgotten; `noun` names the figure.
    `rounds` are round distances for ticks, the roundest first.
    `new` and `kept` name the corpora of each role.
    """

    figure: str
    noun: str
    better: int
    distance: Callable[[float, float], float]
    words: Callable[[float], str]
    rounds: Sequence[float]
    new: str = ""
    kept: str = ""

    def standing(self, row: Row, figures: Figures) -> Standing | None:
        """How far `figures` are from the base; None unless a new and a replayed corpus have the figure, all finite."""
        far: tuple[list[float], list[float]] = [], []
        for name, role in row.roles.items():
            before, now = (of.get(name, {}).get(self.figure) for of in (row.before, figures))
            if before is not None and now is not None:
                far[role == REPLAY].append(self.distance(now, before))
        learned, forgotten = far
        if not learned or not forgotten or not all(map(math.isfinite, learned + forgotten)):
            return None
        return Standing(self.better * mean(learned), -self.better * mean(forgotten))

    def ends(self, rows: Sequence[Row]) -> list[tuple[Row, Standing]]:
        """The rows that have a standing at their end, with it."""
        return [(row, place) for row in rows if (place := self.standing(row, row.after))]

    def on_new(self, learned: float) -> str:
        return self.words(self.better * learned)

    def on_kept(self, forgotten: float) -> str:
        return self.words(-self.better * forgotten)

    def describe(self, place: Standing) -> str:
        return f"{self.on_new(place.learned)} on {self.new}, {self.on_kept(place.forgotten)} on {self.kept}"


def _nats(now: float, before: float) -> float:
    return math.log(now) - math.log(before) if now > 0 and before > 0 else math.inf


def _points(share: float) -> str:
    return f"{100 * share:+.3g}\N{NARROW NO-BREAK SPACE}points".replace("-", MINUS)


_RISES = [
    1.0,
    9.0,
    *(10.0**power - 1 for power in range(2, 13)),
    0.5,
    4.0,
    0.2,
    0.1,
    0.05,
    0.02,
    0.01,
    0.3,
    2.0,
]
_FALLS = [
    0.5,
    0.9,
    *(1 - 10.0**-power for power in range(2, 13)),
    0.2,
    0.8,
    0.1,
    0.95,
    0.6,
    0.3,
    0.7,
    0.4,
    0.98,
    0.05,
]
_CHANGES = [0.0, *map(math.log1p, _RISES), *(math.log1p(-fall) for fall in _FALLS)]
_POINTS = [
    0.0,
    *(
        sign * size / 100
        for size in (100, 20, 40, 60, 80, 50, 10, 30, 70, 90, 5, 2, 1)
        for sign in (1, -1)
    ),
]
PERPLEXITY = Measure("perplexity", "perplexity", -1, _nats, change, _CHANGES)
ACCURACY = Measure("first_token_accuracy", "first token right", 1, operator.sub, _points, _POINTS)


@dataclass(frozen=True)
class Group:
    """The runs of one label at its chosen learning rate, which differ in seed only; `style` is their colour and mark.

    `tried` has a row for each learning rate, in rising order, with the first seed.
    """

    label: str
    style: int
    rows: Sequence[Row]
    tried: Sequence[Row]

    def standing(self, measure: Measure) -> Standing | None:
        """The mean of the standings of its runs; None where one of them has none."""
        places = [place for _, place in measure.ends(self.rows)]
        if len(places) < len(self.rows):
            return None
        return Standing(*(mean(column) for column in zip(*places, strict=True)))


def group(runs: Sequence[Row]) -> list[Group]:
    """The runs by label; labels that several studies use are followed by the study's name.

    A method has the same colour in every report; its other labels, such as that with a gate, have other marks.
    """
    named: dict[str, list[Row]] = {}
    for run in runs:
        is_shared = any(other.label == run.label and other.source != run.source for other in runs)
        named.setdefault(f"{run.label} ({run.source})" if is_shared else run.label, []).append(run)
    groups: list[Group] = []
    for label, members in named.items():
        method = members[0].method
        style = METHODS.index(method) if method in METHODS else len(groups) % len(METHODS)
        while style in {other.style for other in groups}:
            style += len(METHODS)
        tried = [run for run in members if run.seed == members[0].seed]
        tried.sort(key=lambda row: row.learning_rate or 0.0)
        if chosen := [run for run in members if run.chosen]:
            groups.append(Group(label, style, chosen, tried))
    return groups


def measure_of(groups: Sequence[Group]) -> Measure:
    """The measure to compare the runs by: answers if all of them have some, else perplexity."""
    measure = ACCURACY if all(group.standing(ACCURACY) for group in groups) else PERPLEXITY
    roles, shown = corpora(groups), parts(groups)
    new, kept = (
        [name for name in shown if (roles[shown[name][0]] == REPLAY) == is_kept]
        for is_kept in (False, True)
    )
    return replace(measure, new=listed(new), kept=listed(kept))


def corpora(groups: Sequence[Group]) -> dict[str, str]:
    """The role of every corpus that has figures, the new ones first."""
    rows = [row for group in groups for row in group.rows]
    roles = {name: role for row in rows for name, role in row.roles.items() if name in row.before}
    return dict(sorted(roles.items(), key=lambda item: item[1] == REPLAY))


def parts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """What figures and tables show, by name: each corpus, or all of a role together where they are too many."""
    roles, found = corpora(groups), dict[str, list[str]]()
    for role in dict.fromkeys(roles.values()):
        names = [name for name in roles if roles[name] == role]
        if len(names) > _MAX_CORPORA:
            shared = os.path.commonprefix(names).rstrip("_-. /")  # noqa: RUF071  # of letters, not of folders
            found[f"{shared or 'corpora'} ({role})"] = names
        else:
            found |= {name: [name] for name in names}
    return found


def value_of(figures: Figures, part: Sequence[str], figure: str) -> float | None:
    """The mean of a figure over corpora, geometric of perplexities; None where none of them has it."""
    values = [figures[name][figure] for name in part if figure in figures.get(name, {})]
    if not values:
        return None
    return geometric_mean(values) if figure == PERPLEXITY.figure else mean(values)
