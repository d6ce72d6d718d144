"""The runs of a report: read from studies or run folders, grouped by method, and measured against their base."""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeline.errors import RunFolderError
from pipeline.files import is_plain_name, read_object
from pipeline.run_folder.metrics import (
    METRICS,
    TEXTS,
    Figures,
    ValidationRecord,
    geometric_mean,
    mean,
    only_numbers,
    peak_memory_gib,
    read_metrics,
    read_validations,
)
from pipeline.run_folder.status import TRAINING, is_trained
from pipeline.studies.report.words import change, points
from pipeline.studies.results import (
    FROM_TRAINING,
    LEARNING_RATES,
    REPLAY,
    SUMMARY,
    Row,
    checked_rows,
    read_rows,
    read_tried,
)

T = TypeVar("T")
# The same base differs by rounding only: by the dtype and the number of ranks.
_BASE_TOLERANCE = 0.02
_MAX_CORPORA = 3  # of a role, in a figure


@dataclass(frozen=True)
class Run:
    """A row, the name of the folder that it was read from, and the lines of its metrics.jsonl if there is one.

    `written` is what the model wrote after each of `validation.prompts`, by step. `tried` has a row for each learning
    rate of the method, in rising order; only the first seed has them.
    """

    row: Row
    source: str
    metrics: Sequence[Mapping[str, float]]
    written: Mapping[int, Mapping[str, str]]
    tried: Sequence[Row] = ()


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
    lines = read_metrics(folder / METRICS)
    if (folder / METRICS).is_file():
        return [_run(_row_of_run(folder, name, lines), name, lines)]
    if not (folder / SUMMARY).is_file():
        raise RunFolderError(
            f"{folder}: expected a study's folder with its {SUMMARY}, or a run's with its {METRICS}; found neither; "
            "check the path, or train first"
        )
    all_tried = read_tried(folder) if (folder / LEARNING_RATES).is_file() else []
    runs = []
    for row in read_rows(folder):
        own = [tried for tried in all_tried if (tried.label, tried.seed) == (row.label, row.seed)]
        at_rates = [
            row.model_copy(update={"learning_rate": tried.learning_rate, "during": [], "after": tried.after})
            for tried in sorted(own, key=lambda tried: tried.learning_rate)
        ]
        inside = row.folder is not None and is_plain_name(row.folder)
        runs.append(_run(row, name, read_metrics(folder / str(row.folder) / METRICS) if inside else [], at_rates))
    return runs


def _run(row: Row, name: str, lines: Sequence[Mapping[str, Any]], tried: Sequence[Row] = ()) -> Run:
    written = {line["step"]: line[TEXTS] for line in lines if isinstance(line.get(TEXTS), dict)}
    return Run(row, name, [only_numbers(line) for line in lines], written, tried)


def _row_of_run(folder: Path, name: str, lines: Sequence[Mapping[str, Any]]) -> Row:
    before, *during, after = read_validations(lines, folder / METRICS)
    trained = read_object(folder / TRAINING, RunFolderError) if is_trained(folder) else {}
    metrics = [only_numbers(line) for line in lines]
    replayed = {key.partition("/")[2] for line in metrics for key in line if key.startswith("forgetting/")}
    values = {
        **{key: trained[key] for key in FROM_TRAINING if key in trained},
        "label": name,
        "learning_rate": max((line["learning_rate"] for line in metrics if "learning_rate" in line), default=None),
        "peak_memory_gib": peak_memory_gib(metrics),
        "roles": {corpus: REPLAY if corpus in replayed else "new" for corpus in before.figures},
        "before": before.figures,
        "during": during,
        "after": after.figures,
        "steps": after.step,
    }
    return checked_rows(Row, [values], folder / TRAINING)[0]


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
        learned: list[float] = []
        forgotten: list[float] = []
        for name, role in row.roles.items():
            before, now = (of.get(name, {}).get(self.figure) for of in (row.before, figures))
            if before is not None and now is not None:
                (forgotten if role == REPLAY else learned).append(self.distance(now, before))
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

# The position is the style's number.
METHODS = ("fft", "freeze", "lora", "llama_pro", "preserve", "adapt", "route")


@dataclass(frozen=True)
class Group:
    """The runs of one label, which differ in seed only; `style` is their colour and mark."""

    label: str
    style: int
    runs: Sequence[Run]

    @property
    def rows(self) -> list[Row]:
        return [run.row for run in self.runs]

    @property
    def tried(self) -> list[Row]:
        """A row for each learning rate, in rising order, with one seed."""
        return [row for run in self.runs for row in run.tried]

    def standing(self, measure: Measure) -> Standing | None:
        """The mean of the standings of its runs; None where one of them has none."""
        places = [place for _, place in measure.ends(self.rows)]
        if len(places) < len(self.rows):
            return None
        return Standing(*(mean(column) for column in zip(*places, strict=True)))


def group(runs: Sequence[Run]) -> list[Group]:
    """The runs by label; labels that several studies use are followed by the study's name.

    Each group has its method's style, so that a method looks the same in every report, or else the next free one.
    """
    named: dict[str, list[Run]] = {}
    for run in runs:
        label = run.row.label
        is_shared = len({other.source for other in runs if other.row.label == label}) > 1
        named.setdefault(f"{label} ({run.source})" if is_shared else label, []).append(run)
    styles: dict[str, int] = {}
    for label, members in named.items():
        method = members[0].row.method
        if method in METHODS and METHODS.index(method) not in styles.values():
            styles[label] = METHODS.index(method)
    free = (style for style in itertools.count() if style not in styles.values())
    return [
        Group(label, styles[label] if label in styles else styles.setdefault(label, next(free)), members)
        for label, members in named.items()
    ]


def overview(runs: Sequence[Run]) -> list[Group]:
    """The groups, with the corpora of a role merged into their means where they are too many for figures."""
    merged = []
    for run in runs:
        parts = _merged_corpora(run.row.roles)
        rows = [_merged(row, parts) for row in (run.row, *run.tried)]
        merged.append(replace(run, row=rows[0], tried=rows[1:]))
    return group(merged)


def _merged_corpora(roles: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of what is merged: the common beginning of the corpora, or their number."""
    merged: dict[str, list[str]] = {}
    for role in dict.fromkeys(roles.values()):
        names = [name for name, own in roles.items() if own == role]
        if len(names) > _MAX_CORPORA:
            shared = os.path.commonprefix(names)  # noqa: RUF071  # of letters, not of folders
            whole = shared.rstrip("_-. /") or f"{len(names)} corpora"
            merged[f"{whole} ({role})" if whole in (*merged, *roles) else whole] = names
    return merged


def _merged(row: Row, parts: Mapping[str, Sequence[str]]) -> Row:
    gone = {name for names in parts.values() for name in names}

    def merged(figures: Figures) -> Figures:
        found: Figures = {}
        for whole, names in parts.items():
            own = [figures[name] for name in names if name in figures]
            for figure in dict.fromkeys(figure for of in own for figure in of):
                values = [of[figure] for of in own if figure in of]
                average = geometric_mean(values) if figure == "perplexity" else mean(values)
                found.setdefault(whole, {})[figure] = average
        return {**found, **{name: own for name, own in figures.items() if name not in gone}}

    roles = {whole: row.roles[names[0]] for whole, names in parts.items()}
    during = [ValidationRecord(step=each.step, figures=merged(each.figures)) for each in row.during]
    return row.model_copy(
        update={
            "roles": {**roles, **{name: role for name, role in row.roles.items() if name not in gone}},
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
