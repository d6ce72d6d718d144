"""Runs that differ in nothing but their seed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.condensing import condensed
from pipeline.report.rows import Run
from pipeline.report.standing import Measure, Standing
from pipeline.run_folder.averages import mean
from pipeline.run_folder.study_summary import REPLAY, Row

# In the order of the styles that are theirs.
_METHODS = ("fft", "freeze", "lora", "llama_pro", "preserve", "adapt", "route")


@dataclass(frozen=True)
class Group:
    """The runs of one label, in the order of a study; `style` is their colour and mark."""

    label: str
    style: int
    runs: Sequence[Run]

    @property
    def rows(self) -> list[Row]:
        return [run.row for run in self.runs]

    @property
    def tried(self) -> list[Row]:
        """What each learning rate led to, with one seed, in rising order."""
        return [row for run in self.runs for row in run.tried]

    def standing(self, measure: Measure) -> Standing | None:
        """The mean of where its runs end; None where one of them has no standing."""
        places = [one for row in self.rows if (one := measure.standing(row, row.after))]
        if len(places) < len(self.rows):
            return None
        return Standing(*(mean(column) for column in zip(*places, strict=True)))


def group(runs: Sequence[Run]) -> list[Group]:
    """The runs by label; labels that several studies use are told apart by the studies' names."""
    sources: dict[str, set[str]] = {}
    for run in runs:
        sources.setdefault(run.row.label, set()).add(run.source)
    named: dict[str, list[Run]] = {}
    for run in runs:
        label = run.row.label
        named.setdefault(f"{label} ({run.source})" if len(sources[label]) > 1 else label, []).append(run)
    styles = _styles(list(named.values()))
    return [Group(label, style, members) for (label, members), style in zip(named.items(), styles, strict=True)]


def _styles(groups: Sequence[Sequence[Run]]) -> list[int]:
    """A style for each: its method's own, so that a method looks the same in every report; or the next that is free."""
    styles: dict[int, int] = {}
    for at, members in enumerate(groups):
        method = members[0].row.method
        if method in _METHODS and _METHODS.index(method) not in styles.values():
            styles[at] = _METHODS.index(method)
    free = (style for style in itertools.count() if style not in styles.values())
    return [styles[at] if at in styles else next(free) for at in range(len(groups))]


def overview(runs: Sequence[Run]) -> list[Group]:
    """The same with few enough corpora for pictures."""
    return group([condensed(run) for run in runs])


def corpora(groups: Sequence[Group]) -> dict[str, str]:
    """Every corpus's role: first what is learned, then what must not be forgotten."""
    roles = {name: role for one in groups for row in one.rows for name, role in row.roles.items()}
    return dict(sorted(roles.items(), key=lambda item: item[1] == REPLAY))


def figure_names(groups: Sequence[Group]) -> list[str]:
    """Every figure that some run has of some corpus."""
    rows = [row for one in groups for row in one.rows]
    return list(dict.fromkeys(figure for row in rows for figures in row.after.values() for figure in figures))


def frontier(groups: Sequence[Group], measure: Measure) -> list[Group]:
    """Those than which no other both learned more and forgot less."""
    placed = [(one, place) for one in groups if (place := one.standing(measure))]

    def beaten(place: Standing) -> bool:
        return any(
            other.learned >= place.learned and other.forgotten <= place.forgotten and other != place
            for _, other in placed
        )

    return [one for one, place in placed if not beaten(place)]
