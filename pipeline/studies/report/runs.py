"""The runs of a report: read from studies or run folders, grouped by method, and measured against their base."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from pipeline.errors import RunFolderError
from pipeline.files import is_plain_name, read_object
from pipeline.run_folder.metrics import METRICS, Figures, History, ValidationRecord, geometric_mean, mean, read_history
from pipeline.studies.report.words import change, points
from pipeline.studies.results import REPLAY, SUMMARY, Row, read_rows, recorded

T = TypeVar("T")
# The same base differs by rounding only: by the dtype and the number of ranks.
_BASE_TOLERANCE = 0.02
_MAX_CORPORA = 3  # of a role, in a figure
METHODS = ("fft", "freeze", "lora", "llama_pro", "preserve", "adapt", "route")
"""The position is the style's number."""


@dataclass(frozen=True)
class Run:
    """A row, the name of the folder that it was read from, and by step what the model wrote after each prompt."""

    row: Row
    source: str
    written: Mapping[int, Mapping[str, str]]


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in each folder: all of a study's summary.json, or a single run.

    Raises:
        RunFolderError: a folder is neither, a file in it cannot be read, or the runs have different bases.
    """
    unique = list(dict.fromkeys((path.parent if path.name == SUMMARY else path).resolve() for path in folders))
    names = [folder.name for folder in unique]
    runs: list[Run] = []
    for folder in unique:
        alone = names.count(folder.name) == 1
        runs += _read(folder, folder.name if alone else f"{folder.parent.name}/{folder.name}")
    _check_same_base(runs)
    return runs


def _check_same_base(runs: Sequence[Run]) -> None:
    """Raises RunFolderError where two runs began with other figures of a corpus: distances from the base would lie."""
    first: dict[tuple[str, str], tuple[Run, float]] = {}
    for run in runs:
        for corpus, figures in run.row.before.items():
            for name in figures.keys() & {"perplexity", "bits_per_byte"}:
                other, expected = first.setdefault((corpus, name), (run, figures[name]))
                if not math.isclose(figures[name], expected, rel_tol=_BASE_TOLERANCE):
                    raise RunFolderError(
                        f"{other.source} and {run.source}: the base of {other.row.label} has a {name} of "
                        f"{expected:.4g} on {corpus}, that of {run.row.label} {figures[name]:.4g}: they differ in "
                        "base, tokenizer or held-out text; report them apart (--beside compares two studies in a table)"
                    )


def _read(folder: Path, name: str) -> list[Run]:
    if (folder / METRICS).is_file():
        history = read_history(folder / METRICS)
        return [Run(_row_of_run(folder, name, history), name, history.written)]
    if not (folder / SUMMARY).is_file():
        raise RunFolderError(
            f"{folder}: expected a study's folder with its {SUMMARY}, or a run's with its {METRICS}; found neither; "
            "check the path, or train first"
        )
    rows = read_rows(folder)
    inside = [row.folder is not None and is_plain_name(row.folder) for row in rows]
    return [
        Run(row, name, _written(folder / str(row.folder)) if own else {}) for row, own in zip(rows, inside, strict=True)
    ]


def _written(folder: Path) -> dict[int, dict[str, str]]:
    return read_history(folder / METRICS, validated=False).written


def _row_of_run(folder: Path, name: str, history: History) -> Row:
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


_RISES = [1.0, 9.0, *(10.0**power - 1 for power in range(2, 13)), 0.5, 4.0, 0.2, 0.1, 0.05, 0.02, 0.01, 0.3, 2.0]
_FALLS = [0.5, 0.9, *(1 - 10.0**-power for power in range(2, 13)), 0.2, 0.8, 0.1, 0.95, 0.6, 0.3, 0.7, 0.4, 0.98, 0.05]
_CHANGES = [0.0, *map(math.log1p, _RISES), *(math.log1p(-fall) for fall in _FALLS)]
_POINTS = [0.0, *(sign * size / 100 for size in (100, 20, 40, 60, 80, 50, 10, 30, 70, 90, 5, 2, 1) for sign in (1, -1))]
PERPLEXITY = Measure("perplexity", "perplexity", -1, _nats, change, _CHANGES)
ACCURACY = Measure("first_token_accuracy", "first token right", 1, operator.sub, points, _POINTS)


@dataclass(frozen=True)
class Group:
    """The runs of one label at its chosen learning rate, which differ in seed only; `style` is their colour and mark.

    `tried` has a row for each learning rate, in rising order, with the first seed.
    """

    label: str
    style: int
    runs: Sequence[Run]
    tried: Sequence[Row]

    @property
    def rows(self) -> list[Row]:
        return [run.row for run in self.runs]

    def standing(self, measure: Measure) -> Standing | None:
        """The mean of the standings of its runs; None where one of them has none."""
        places = [place for _, place in measure.ends(self.rows)]
        if len(places) < len(self.rows):
            return None
        return Standing(*(mean(column) for column in zip(*places, strict=True)))


def group(runs: Sequence[Run]) -> list[Group]:
    """The runs by label; labels that several studies use are followed by the study's name.

    A method has the same colour in every report; its other labels, such as that with a gate, have other marks.
    """
    named: dict[str, list[Run]] = {}
    for run in runs:
        label = run.row.label
        is_shared = len({other.source for other in runs if other.row.label == label}) > 1
        named.setdefault(f"{label} ({run.source})" if is_shared else label, []).append(run)
    groups: list[Group] = []
    for label, members in named.items():
        method = members[0].row.method
        style = METHODS.index(method) if method in METHODS else len(groups) % len(METHODS)
        while style in {other.style for other in groups}:
            style += len(METHODS)
        tried = [run.row for run in members if run.row.seed == members[0].row.seed]
        tried.sort(key=lambda row: row.learning_rate or 0.0)
        if chosen := [run for run in members if run.row.chosen]:
            groups.append(Group(label, style, chosen, tried))
    return groups


def overview(runs: Sequence[Run]) -> list[Group]:
    """The groups, with the corpora of a role merged into their means where they are too many for figures."""
    return group([replace(run, row=_merged(run.row)) for run in runs])


def _merged(row: Row) -> Row:
    """The row with such means, named after the common beginning of the corpora and their role."""
    parts: dict[str, list[str]] = {}
    for role in dict.fromkeys(row.roles.values()):
        names = [name for name, own in row.roles.items() if own == role]
        if len(names) > _MAX_CORPORA:
            shared = os.path.commonprefix(names).rstrip("_-. /")  # noqa: RUF071  # of letters, not of folders
            parts[f"{shared or 'corpora'} ({role})"] = names

    def merged(figures: Figures) -> Figures:
        found = dict(figures)
        for whole, names in parts.items():
            own = [found.pop(name) for name in names if name in found]
            known = dict.fromkeys(figure for of in own for figure in of)
            values = {figure: [of[figure] for of in own if figure in of] for figure in known}
            if own:
                found[whole] = {
                    name: geometric_mean(of) if name == "perplexity" else mean(of) for name, of in values.items()
                }
        return found

    gone = {name for names in parts.values() for name in names}
    roles = {name: role for name, role in row.roles.items() if name not in gone}
    during = [ValidationRecord(step=each.step, figures=merged(each.figures)) for each in row.during]
    return row.model_copy(
        update={
            "roles": roles | {whole: row.roles[names[0]] for whole, names in parts.items()},
            "before": merged(row.before),
            "during": during,
            "after": merged(row.after),
        }
    )


def measure_of(groups: Sequence[Group]) -> Measure:
    """The measure to compare the runs by: answers if all of them have some, else perplexity."""
    return ACCURACY if all(group.standing(ACCURACY) for group in groups) else PERPLEXITY


def corpora(groups: Sequence[Group]) -> dict[str, str]:
    """The role of every corpus, the new ones first."""
    roles = {name: role for group in groups for row in group.rows for name, role in row.roles.items()}
    return dict(sorted(roles.items(), key=lambda item: item[1] == REPLAY))


def figure_names(groups: Sequence[Group]) -> list[str]:
    """Every figure that some run has for some corpus."""
    rows = [row for group in groups for row in group.rows]
    return list(dict.fromkeys(figure for row in rows for figures in row.after.values() for figure in figures))


def not_dominated(placed: Sequence[tuple[T, Standing]]) -> list[tuple[T, Standing]]:
    """The Pareto front: no other item learned as much and forgot as little, and was better in one of the two."""

    def is_dominated(place: Standing) -> bool:
        return any(
            other.learned >= place.learned and other.forgotten <= place.forgotten and other != place
            for _, other in placed
        )

    return [(item, place) for item, place in placed if not is_dominated(place)]
