"""Where a run stands between learning and forgetting, by perplexity or by the answers that it gives."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.report.axes import round_changes, round_points
from pipeline.report.numbers import change, points
from pipeline.run_folder.averages import mean
from pipeline.run_folder.looks import Figures
from pipeline.run_folder.study_summary import REPLAY, Row


class Standing(NamedTuple):
    """How far a run is from the base: on the new corpora to the better, on the replayed ones to the worse."""

    learned: float
    forgotten: float


@dataclass(frozen=True)
class Measure:
    """A figure of every corpus, as a distance from the base's.

    `distance` is that of a value from the base's, better ones above 0 where `better` is 1, below it where that is −1;
    `words` writes a distance, `noun` says what the figure is, and `rounds` which distances are round ones, or with −1
    their opposites, the roundest first.
    """

    figure: str
    noun: str
    better: int
    distance: Callable[[float, float], float]
    words: Callable[[float], str]
    rounds: Callable[[int], Sequence[float]]

    def standing(self, row: Row, figures: Figures) -> Standing | None:
        """Where `figures` of a run are; None without a new and a replayed corpus that have the figure, finite."""
        learned: list[float] = []
        forgotten: list[float] = []
        for name, role in row.roles.items():
            before, now = (of.get(name, {}).get(self.figure) for of in (row.before, figures))
            if before is not None and now is not None:
                (forgotten if role == REPLAY else learned).append(self.distance(now, before))
        if not learned or not forgotten or not all(map(math.isfinite, learned + forgotten)):
            return None
        return Standing(self.better * mean(learned), -self.better * mean(forgotten))

    def said(self, standing: Standing, learned: str, kept: str) -> str:
        """A standing in words, on corpora of these names."""
        return f"{self.on_new(standing.learned)} on {learned}, {self.on_kept(standing.forgotten)} on {kept}"

    def on_new(self, learned: float) -> str:
        """What was learned, as the figure's change."""
        return self.words(self.better * learned)

    def on_kept(self, forgotten: float) -> str:
        """What was forgotten, as the figure's change."""
        return self.words(-self.better * forgotten)


def _nats(now: float, before: float) -> float:
    return math.log(now) - math.log(before) if now > 0 and before > 0 else math.inf


PERPLEXITY = Measure("perplexity", "perplexity", -1, _nats, change, round_changes)
ACCURACY = Measure("first_token_accuracy", "first token right", 1, operator.sub, points, round_points)


def measure_of(rows: Iterable[Row]) -> Measure:
    """What the runs are best compared by: the answers where all of them gave some, else perplexity."""
    return ACCURACY if all(ACCURACY.standing(row, row.after) for row in rows) else PERPLEXITY
