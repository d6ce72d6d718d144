"""The runs of a report by method, and how far each moved from its base."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeline.extensions.report.formats import MINUS, change, listed
from pipeline.run_folder.metrics import Figures, geometric_mean, mean
from studies.report.results import REPLAY, Row

_MAX_CORPORA = 3
"""If a role has more corpora, they are shown together."""
METHODS = ("fft", "freeze", "lora", "llama_pro", "preserve", "adapt", "route")
"""The position of a method is the number of its style."""


class Standing(NamedTuple):
    """How far a run moved from its base.

    `learned` is the change to the better on the new corpora, `forgotten` that to the worse on the
    corpora of role replay.
    """

    learned: float
    forgotten: float


def on_frontier(place: Standing, named: Sequence[tuple[str, Standing]]) -> bool:
    """Whether no other of the named places both learned at least as much and forgot no more."""
    for _, other in named:
        is_better = other.learned >= place.learned and other.forgotten <= place.forgotten
        if is_better and other != place:
            return False
    return True


@dataclass(frozen=True)
class Measure:
    """A figure of every corpus, as a distance from the base's value.

    Attributes:
        noun: the name of the figure in sentences.
        better: 1 where a better value has a distance above 0, −1 where it has one below 0.
        distance: compares a value with the base's.
        words: writes a distance.
        rounds: round distances for ticks, the roundest first.
        new: the names of the corpora of role new.
        kept: the names of the corpora of role replay.
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
        """How far `figures` are from the base of `row`.

        None unless a corpus of each role has the figure, and all distances are finite.
        """
        learned: list[float] = []
        forgotten: list[float] = []
        for name, role in row.roles.items():
            before = row.before.get(name, {}).get(self.figure)
            now = figures.get(name, {}).get(self.figure)
            if before is None or now is None:
                continue
            distances = forgotten if role == REPLAY else learned
            distances.append(self.distance(now, before))
        if not learned or not forgotten:
            return None
        for distance in learned + forgotten:
            if not math.isfinite(distance):
                return None
        # Both rise with what they are named after, whichever way the figure goes.
        return Standing(self.better * mean(learned), -self.better * mean(forgotten))

    def ends(self, rows: Sequence[Row]) -> list[tuple[Row, Standing]]:
        """The rows that have a standing at their end, with it."""
        found: list[tuple[Row, Standing]] = []
        for row in rows:
            place = self.standing(row, row.after)
            if place is not None:
                found.append((row, place))
        return found

    def on_new(self, learned: float) -> str:
        """In words, the change of the figure on the new corpora."""
        return self.words(self.better * learned)

    def on_kept(self, forgotten: float) -> str:
        """In words, the change of the figure on the corpora of role replay."""
        return self.words(-self.better * forgotten)

    def describe(self, place: Standing) -> str:
        """Both changes in words."""
        learned = self.on_new(place.learned)
        forgotten = self.on_kept(place.forgotten)
        return f"{learned} on {self.new}, {forgotten} on {self.kept}"


def _nats(now: float, before: float) -> float:
    if now > 0 and before > 0:
        # Not the logarithm of the ratio, which may overflow.
        return math.log(now) - math.log(before)
    return math.inf


def _points(share: float) -> str:
    return f"{100 * share:+.3g}\N{NARROW NO-BREAK SPACE}points".replace("-", MINUS)


def _round_changes() -> list[float]:
    """Changes of a perplexity that are round as percentages or factors, in nats.

    The roundest come first.
    """
    changes = [0.0, 1.0, 9.0]
    for power in range(2, 13):
        changes.append(10.0**power - 1)
    changes += [0.5, 4.0, 0.2, 0.1, 0.05, 0.02, 0.01, 0.3, 2.0]
    changes += [-0.5, -0.9]
    for power in range(2, 13):
        changes.append(10.0**-power - 1)
    changes += [-0.2, -0.8, -0.1, -0.95, -0.6, -0.3, -0.7, -0.4, -0.98, -0.05]
    return [math.log1p(fraction) for fraction in changes]


def _round_shares() -> list[float]:
    """Changes of a share in whole percentage points, the roundest first."""
    rounds = [0.0]
    for points in (100, 20, 40, 60, 80, 50, 10, 30, 70, 90, 5, 2, 1):
        rounds += [points / 100, -points / 100]
    return rounds


PERPLEXITY = Measure("perplexity", "perplexity", -1, _nats, change, _round_changes())
ACCURACY = Measure(
    "first_token_accuracy", "first token right", 1, operator.sub, _points, _round_shares()
)


@dataclass(frozen=True)
class Group:
    """The runs of one label at its chosen learning rate, which differ in seed only.

    Attributes:
        style: the number of their colour and mark.
        tried: a row for each learning rate, in rising order, with the first seed.
    """

    label: str
    style: int
    rows: Sequence[Row]
    tried: Sequence[Row]

    def standing(self, measure: Measure) -> Standing | None:
        """The mean of the standings of its runs; None where one of them has none."""
        learned: list[float] = []
        forgotten: list[float] = []
        for _, place in measure.ends(self.rows):
            learned.append(place.learned)
            forgotten.append(place.forgotten)
        # A mean over the others would hide that a run has diverged.
        if len(learned) < len(self.rows):
            return None
        return Standing(mean(learned), mean(forgotten))


def group(runs: Sequence[Row]) -> list[Group]:
    """The runs by label; labels that several studies use are followed by the study's name.

    A method has the same colour in every report. Its other labels, such as that with a gate, have
    other marks.
    """
    sources: dict[str, set[str]] = {}
    for run in runs:
        sources.setdefault(run.label, set()).add(run.source)
    named: dict[str, list[Row]] = {}
    for run in runs:
        label = run.label
        if len(sources[label]) > 1:
            label = f"{label} ({run.source})"
        named.setdefault(label, []).append(run)

    groups: list[Group] = []
    for label, members in named.items():
        chosen = [run for run in members if run.chosen]
        if not chosen:
            continue
        # All rates have the first seed; the other seeds have the chosen rate alone.
        tried = [run for run in members if run.seed == members[0].seed]
        tried.sort(key=lambda row: row.learning_rate or 0.0)
        style = _free_style(members[0].method, groups)
        groups.append(Group(label, style, chosen, tried))
    return groups


def _free_style(method: str | None, groups: Sequence[Group]) -> int:
    """The first style of the method's colour that no group has yet."""
    if method in METHODS:
        style = METHODS.index(method)
    else:
        style = len(groups) % len(METHODS)
    taken = {group.style for group in groups}
    while style in taken:
        # As many styles further there is the same colour with another mark.
        style += len(METHODS)
    return style


def measure_of(groups: Sequence[Group]) -> Measure:
    """The measure to compare the runs by: answers if all of them have some, else perplexity."""
    measure = PERPLEXITY
    # All by the same: an axis cannot have two measures.
    if all(group.standing(ACCURACY) for group in groups):
        measure = ACCURACY
    roles = corpora(groups)
    new: list[str] = []
    kept: list[str] = []
    for name, members in parts(groups).items():
        if roles[members[0]] == REPLAY:
            kept.append(name)
        else:
            new.append(name)
    return replace(measure, new=listed(new), kept=listed(kept))


def corpora(groups: Sequence[Group]) -> dict[str, str]:
    """The role of every corpus that has figures, the new ones first."""
    roles: dict[str, str] = {}
    for group in groups:
        for row in group.rows:
            for name, role in row.roles.items():
                if name in row.before:
                    roles[name] = role
    return dict(sorted(roles.items(), key=lambda item: item[1] == REPLAY))


def parts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The corpora of each part that figures and tables show, by its name.

    A part is one corpus, or all of a role where these are too many.
    """
    roles = corpora(groups)
    found: dict[str, list[str]] = {}
    for role in dict.fromkeys(roles.values()):
        names = [name for name in roles if roles[name] == role]
        if len(names) > _MAX_CORPORA:
            # The letters that the names begin with, not folders.
            shared = os.path.commonprefix(names).rstrip("_-. /")  # noqa: RUF071
            found[f"{shared or 'corpora'} ({role})"] = names
        else:
            for name in names:
                found[name] = [name]
    return found


def value_of(figures: Figures, part: Sequence[str], figure: str) -> float | None:
    """The mean of a figure over corpora, geometric of perplexities; None where none has it."""
    values: list[float] = []
    for name in part:
        if figure in figures.get(name, {}):
            values.append(figures[name][figure])
    if not values:
        return None
    if figure == PERPLEXITY.figure:
        return geometric_mean(values)
    return mean(values)
