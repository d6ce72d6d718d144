"""The runs of a report: read from studies or run folders, grouped by method, and measured against their base."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import RunFolderError
from pipeline.files import read_object
from pipeline.run_folder.metrics import METRICS, Figures, geometric_mean, mean, read_history
from pipeline.studies.report.words import MINUS, change
from pipeline.studies.results import REPLAY, SUMMARY, Row, read_rows, recorded

_MAX_CORPORA = 3  # of a role; more are shown together
METHODS = ("fft", "freeze", "lora", "llama_pro", "preserve", "adapt", "route")
"""The position is the style's number."""


def read_runs(folders: Iterable[Path]) -> list[Row]:
    """The rows of each folder: all of a study's summary.json, or that of a single run.

    Raises:
        RunFolderError: a folder is neither, a file in it cannot be read, or the runs have different bases.
    """
    unique = list(dict.fromkeys(path.resolve() for path in folders))
    names = [folder.name for folder in unique]
    runs: list[Row] = []
    for folder in unique:
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        rows = [_row_of_run(folder, name)] if (folder / METRICS).is_file() else read_rows(folder)
        runs += [row.model_copy(update={"source": name}) for row in rows]
    _check_same_base(runs)
    return runs


def _check_same_base(runs: Sequence[Row]) -> None:
    """Raises RunFolderError where two runs began with other figures of a corpus: distances from the base would lie."""
    first: dict[tuple[str, str], tuple[Row, float]] = {}
    for run in runs:
        for corpus, figures in run.before.items():
            for name in figures.keys() & {"perplexity", "bits_per_byte"}:
                other, expected = first.setdefault((corpus, name), (run, figures[name]))
                # The same base differs by rounding only: by the dtype and the number of ranks.
                if not math.isclose(figures[name], expected, rel_tol=0.02):
                    raise RunFolderError(
                        f"{other.source} and {run.source}: the base of {other.label} has a {name} of "
                        f"{expected:.4g} on {corpus}, that of {run.label} {figures[name]:.4g}: they differ in "
                        "base, tokenizer or held-out text; report them apart"
                    )


def _row_of_run(folder: Path, name: str) -> Row:
    history = read_history(folder / METRICS)
    row = recorded(folder, history)
    # What `scale-cpt evaluate --chats` measured.
    summary = read_object(folder / SUMMARY, RunFolderError) if (folder / SUMMARY).is_file() else {}
    chats = {
        when: {name: {key: own[key] for key in own.keys() - {"chats"}} for name, own in files.items()}
        for when, files in summary.get("chats", {}).items()
    }
    roles = {corpus: REPLAY if corpus in history.forgetting else "new" for corpus in row["before"]}
    row |= {when: row[when] | chats.get(when, {}) for when in ("before", "after")}
    kept = dict.fromkeys(chats.get("before", ()), REPLAY)
    return Row(**row, label=name, learning_rate=history.learning_rate, roles=roles | kept)


class Standing(NamedTuple):
    """How far a run moved from its base: to the better on the new corpora, to the worse on the replayed ones."""

    learned: float
    forgotten: float


def on_frontier(place: Standing, named: Sequence[tuple[str, Standing]]) -> bool:
    """Whether no other both learned at least as much and forgot no more."""
    return not any(to.learned >= place.learned and to.forgotten <= place.forgotten and to != place for _, to in named)


@dataclass(frozen=True)
class Measure:
    """A figure of every corpus, as a distance from the base's value.

    `distance` compares a value with the base's; better values are above 0 where `better` is 1, below 0 where it is −1.
    `words` writes a distance, `noun` names the figure. `rounds` are round distances for ticks, the roundest first.
    """

    figure: str
    noun: str
    better: int
    distance: Callable[[float, float], float]
    words: Callable[[float], str]
    rounds: Sequence[float]

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
        """What was learned, as a change of the figure."""
        return self.words(self.better * learned)

    def on_kept(self, forgotten: float) -> str:
        """What was forgotten, as a change of the figure."""
        return self.words(-self.better * forgotten)

    def describe(self, standing: Standing, learned: str, kept: str) -> str:
        """A standing in words; the arguments name the corpora."""
        return f"{self.on_new(standing.learned)} on {learned}, {self.on_kept(standing.forgotten)} on {kept}"


def _nats(now: float, before: float) -> float:
    return math.log(now) - math.log(before) if now > 0 and before > 0 else math.inf


def _points(share: float) -> str:
    return f"{100 * share:+.3g}\N{NARROW NO-BREAK SPACE}points".replace("-", MINUS)


_RISES = [1.0, 9.0, *(10.0**power - 1 for power in range(2, 13)), 0.5, 4.0, 0.2, 0.1, 0.05, 0.02, 0.01, 0.3, 2.0]
_FALLS = [0.5, 0.9, *(1 - 10.0**-power for power in range(2, 13)), 0.2, 0.8, 0.1, 0.95, 0.6, 0.3, 0.7, 0.4, 0.98, 0.05]
_CHANGES = [0.0, *map(math.log1p, _RISES), *(math.log1p(-fall) for fall in _FALLS)]
_POINTS = [0.0, *(sign * size / 100 for size in (100, 20, 40, 60, 80, 50, 10, 30, 70, 90, 5, 2, 1) for sign in (1, -1))]
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
        label = run.label
        is_shared = len({other.source for other in runs if other.label == label}) > 1
        named.setdefault(f"{label} ({run.source})" if is_shared else label, []).append(run)
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
    return ACCURACY if all(group.standing(ACCURACY) for group in groups) else PERPLEXITY


def corpora(groups: Sequence[Group]) -> dict[str, str]:
    """The role of every corpus that has figures, the new ones first."""
    rows = [row for group in groups for row in group.rows]
    roles = {name: role for row in rows for name, role in row.roles.items() if name in row.before}
    return dict(sorted(roles.items(), key=lambda item: item[1] == REPLAY))


def parts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """What figures and tables show, by name: each corpus, or all of a role together where they are too many."""
    of_role: dict[str, list[str]] = {}
    for name, role in corpora(groups).items():
        of_role.setdefault(role, []).append(name)
    found: dict[str, list[str]] = {}
    for role, names in of_role.items():
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
