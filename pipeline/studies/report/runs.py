"""The runs of a report: read from studies or run folders, measured against their base, and grouped by method."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeline.errors import RunFolderError
from pipeline.files import read_object
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
from pipeline.run_folder.status import TRAINING
from pipeline.scale.gate_folder import GATE_FOLDER, GATE_RECORD, GateRecord, open_record
from pipeline.studies.report.axes import change, points, round_changes, round_points
from pipeline.studies.results import LEARNING_RATES, REPLAY, SUMMARY, Row, Tried, checked_row, read_rows, read_tried

T = TypeVar("T")
# The same base differs by rounding only: by the dtype and the number of ranks.
_BASE_TOLERANCE = 0.02
_FROM_TRAINING = ("trainable_parameters", "total_parameters", "tokens_seen", "seconds")


@dataclass(frozen=True)
class Run:
    """A row, the name of the folder that it was read from, and the lines of its metrics.jsonl if there is one.

    `tried` has a row for each learning rate of the method, in rising order; only the first seed has them. `gate` is
    the record of the run's gate, if it has one. `written` is what the model wrote after each of `validation.prompts`,
    by step.
    """

    row: Row
    source: str
    metrics: Sequence[Mapping[str, float]] = ()
    tried: Sequence[Row] = ()
    gate: GateRecord | None = None
    written: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in each folder: all of a study's summary.json, or a single run.

    Raises:
        RunFolderError: a folder is neither, a file in it cannot be read, or the runs have different bases.
        CheckpointError: the record of a gate is damaged.
    """
    unique = dict.fromkeys((path.parent if path.name == SUMMARY else path).resolve() for path in folders)
    runs = [run for folder in unique for run in _read(folder, _name(folder, unique))]
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
        return [_of_run(folder, name)]
    if (folder / SUMMARY).is_file():
        tried = read_tried(folder) if (folder / LEARNING_RATES).is_file() else []
        return [_of_study(folder, name, row, tried) for row in read_rows(folder)]
    raise RunFolderError(
        f"{folder}: expected a study's folder with its {SUMMARY}, or a run's with its {METRICS}; found neither; "
        "check the path, or train first"
    )


def _of_study(folder: Path, name: str, row: Row, tried: Sequence[Tried]) -> Run:
    own = [other for other in tried if (other.label, other.seed) == (row.label, row.seed)]
    at_rates = [
        row.model_copy(update={"learning_rate": other.learning_rate, "during": [], "after": other.after})
        for other in sorted(own, key=lambda other: other.learning_rate)
    ]
    own_folder = _inside(folder, row.folder)
    lines = read_metrics(own_folder / METRICS)
    return Run(row, name, _numbers(lines), at_rates, _gate(own_folder), _written(lines))


def _of_run(folder: Path, name: str) -> Run:
    lines = read_metrics(folder / METRICS)
    before, *during, after = read_validations(lines, folder / METRICS)
    metrics = _numbers(lines)
    replayed = {key.partition("/")[2] for line in lines for key in line if key.startswith("forgetting/")}
    trained = _training(folder)
    values = {
        **{key: trained[key] for key in _FROM_TRAINING if key in trained},
        "label": name,
        "learning_rate": max((line["learning_rate"] for line in metrics if "learning_rate" in line), default=None),
        "peak_memory_gib": peak_memory_gib(metrics),
        "roles": {corpus: REPLAY if corpus in replayed else "new" for corpus in before.figures},
        "before": before.figures,
        "during": during,
        "after": after.figures,
        "steps": after.step,
    }
    return Run(
        checked_row(Row, values, str(folder / TRAINING)), name, metrics, gate=_gate(folder), written=_written(lines)
    )


def _gate(folder: Path) -> GateRecord | None:
    gate = folder / GATE_FOLDER
    return open_record(gate) if (gate / GATE_RECORD).exists() else None


def _written(lines: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, str]]:
    found = {line["step"]: line[TEXTS] for line in lines if isinstance(line.get(TEXTS), dict)}
    return {step: {prompt: str(text) for prompt, text in texts.items()} for step, texts in found.items()}


def _numbers(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    return [only_numbers(line) for line in lines]


def _training(folder: Path) -> Mapping[str, Any]:
    """The contents of training.json; empty where the run is not finished."""
    path = folder / TRAINING
    try:
        return read_object(path, RunFolderError)
    except FileNotFoundError:
        return {}


def _inside(folder: Path, name: str | None) -> Path:
    """The folder `name` of a study. Raises RunFolderError for one outside of it."""
    path = (folder / (name or "")).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise RunFolderError(f"{folder / SUMMARY}: folder {name!r} lies outside of the study; expected one in it")
    return path


def _name(folder: Path, others: Iterable[Path]) -> str:
    """The folder's name, with as many of its parents as make it different from the others."""
    depths = range(1, len(folder.parts))
    others = [other for other in others if other != folder]
    depth = next((deep for deep in depths if all(other.parts[-deep:] != folder.parts[-deep:] for other in others)), 1)
    return "/".join(folder.parts[-depth:])


_MAX_CORPORA = 3  # of a role, in a figure


def condensed(run: Run) -> Run:
    """The run with the corpora of a role merged into their means (geometric ones of perplexities) if they are many."""
    named = {role: [name for name, own in run.row.roles.items() if own == role] for role in run.row.roles.values()}
    many = {role: names for role, names in named.items() if len(names) > _MAX_CORPORA}
    if not many:
        return run
    shared = [_shared_name(names) for names in many.values()]
    alone = [name for names in named.values() if len(names) <= _MAX_CORPORA for name in names]
    parts = {
        whole if [*shared, *alone].count(whole) == 1 else f"{whole} ({role})": names
        for whole, (role, names) in zip(shared, many.items(), strict=True)
    }
    return replace(run, row=_merged(run.row, parts), tried=[_merged(row, parts) for row in run.tried])


def _merged(row: Row, parts: Mapping[str, Sequence[str]]) -> Row:
    gone = {name for names in parts.values() for name in names}
    roles = {whole: row.roles[names[0]] for whole, names in parts.items()}

    def merged(figures: Figures) -> Figures:
        means = {whole: _means([figures[name] for name in names if name in figures]) for whole, names in parts.items()}
        return {**means, **{name: own for name, own in figures.items() if name not in gone}}

    changed = {
        "roles": {**roles, **{name: role for name, role in row.roles.items() if name not in gone}},
        "before": merged(row.before),
        "during": [
            ValidationRecord(step=validation.step, figures=merged(validation.figures)) for validation in row.during
        ],
        "after": merged(row.after),
    }
    return row.model_copy(update=changed)


def _means(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for own in figures:
        for name, value in own.items():
            values.setdefault(name, []).append(value)
    return {name: geometric_mean(found) if name == "perplexity" else mean(found) for name, found in values.items()}


def _shared_name(names: Sequence[str]) -> str:
    """The common beginning of the names, or their number."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike).rstrip("_-. /") or f"{len(names)} corpora"


class Standing(NamedTuple):
    """How far a run moved from its base: to the better on the new corpora, to the worse on the replayed ones."""

    learned: float
    forgotten: float


@dataclass(frozen=True)
class Measure:
    """A figure of every corpus, as a distance from the base's value.

    `distance` compares a value with the base's; better values are above 0 where `better` is 1, below 0 where it is −1.
    `words` writes a distance, `noun` names the figure. `rounds` lists round distances for ticks, the roundest first, or
    with −1 their opposites.
    """

    figure: str
    noun: str
    better: int
    distance: Callable[[float, float], float]
    words: Callable[[float], str]
    rounds: Callable[[int], Sequence[float]]

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

    def describe(self, standing: Standing, learned: str, kept: str) -> str:
        """A standing in words; the arguments name the corpora."""
        return f"{self.on_new(standing.learned)} on {learned}, {self.on_kept(standing.forgotten)} on {kept}"

    def on_new(self, learned: float) -> str:
        """What was learned, as a change of the figure."""
        return self.words(self.better * learned)

    def on_kept(self, forgotten: float) -> str:
        """What was forgotten, as a change of the figure."""
        return self.words(-self.better * forgotten)


def _nats(now: float, before: float) -> float:
    return math.log(now) - math.log(before) if now > 0 and before > 0 else math.inf


PERPLEXITY = Measure("perplexity", "perplexity", -1, _nats, change, round_changes)
ACCURACY = Measure("first_token_accuracy", "first token right", 1, operator.sub, points, round_points)


def measure_of(rows: Iterable[Row]) -> Measure:
    """The measure to compare the runs by: answers if all of them have some, else perplexity."""
    return ACCURACY if all(ACCURACY.standing(row, row.after) for row in rows) else PERPLEXITY


# The position is the style's number.
_METHODS = ("fft", "freeze", "lora", "llama_pro", "preserve", "adapt", "route")


def style_of_method(method: str) -> int:
    """The colour and mark of a method, the same in every picture."""
    return _METHODS.index(method)


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
        places = [place for row in self.rows if (place := measure.standing(row, row.after))]
        if len(places) < len(self.rows):
            return None
        return Standing(*(mean(column) for column in zip(*places, strict=True)))


def group(runs: Sequence[Run]) -> list[Group]:
    """The runs by label; labels that several studies use are followed by the study's name."""
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
    """A style for each: its method's, so that a method looks the same in every report, or else the next free one."""
    styles: dict[int, int] = {}
    for at, members in enumerate(groups):
        method = members[0].row.method
        if method in _METHODS and style_of_method(method) not in styles.values():
            styles[at] = style_of_method(method)
    free = (style for style in itertools.count() if style not in styles.values())
    return [styles[at] if at in styles else next(free) for at in range(len(groups))]


def overview(runs: Sequence[Run]) -> list[Group]:
    """The groups, with few enough corpora for figures."""
    return group([condensed(run) for run in runs])


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
