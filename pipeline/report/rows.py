"""What a report is made of: the rows of studies' summary.json, or a run folder's own figures, with its metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import RunFolderError
from pipeline.run_folder.looks import looks_of, only_numbers, peak_memory_gib
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.run_folder.status import SUMMARY as TRAINING
from pipeline.run_folder.study_summary import (
    LEARNING_RATES,
    REPLAY,
    SUMMARY,
    Row,
    Tried,
    checked_row,
    read_rows,
    read_tried,
)

_FROM_TRAINING = ("trainable_parameters", "total_parameters", "tokens_seen", "seconds")


@dataclass(frozen=True)
class Run:
    """A row, the name of what it comes from, and the lines of its metrics.jsonl, none where that is not there.

    `tried` is the same row as each learning rate of the study left it, in rising order; of the first seed alone.
    """

    row: Row
    source: str
    metrics: Sequence[Mapping[str, float]] = ()
    tried: Sequence[Row] = ()


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs of each folder: a study's, all that its summary.json lists, or a run's own.

    Raises:
        RunFolderError: a folder is neither, or what it says cannot be read.
    """
    places = dict.fromkeys((one.parent if one.name == SUMMARY else one).resolve() for one in folders)
    return [run for place in places for run in _read(place, _name(place, places))]


def _read(folder: Path, name: str) -> list[Run]:
    if (folder / METRICS).is_file():
        return [_of_run(folder, name)]
    if (folder / SUMMARY).is_file():
        tried = read_tried(folder) if (folder / LEARNING_RATES).is_file() else []
        return [_of_study(folder, name, row, tried) for row in read_rows(folder)]
    raise RunFolderError(f"{folder}: expected a study's {SUMMARY}, a list, or a run's {METRICS}; found neither")


def _of_study(folder: Path, name: str, row: Row, tried: Sequence[Tried]) -> Run:
    own = sorted(
        (one for one in tried if (one.label, one.seed) == (row.label, row.seed)), key=lambda one: one.learning_rate
    )
    left = [
        row.model_copy(update={"learning_rate": one.learning_rate, "during": [], "after": one.after}) for one in own
    ]
    return Run(row, name, _numbers(read_metrics(_inside(folder, row.folder) / METRICS)), left)


def _of_run(folder: Path, name: str) -> Run:
    lines = read_metrics(folder / METRICS)
    before, *during, after = looks_of(lines, folder / METRICS)
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
    return Run(checked_row(Row, values, str(folder / TRAINING)), name, metrics)


def _numbers(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    return [only_numbers(line) for line in lines]


def _training(folder: Path) -> Mapping[str, Any]:
    """The figures of a run that has come to its end; none of one that has not."""
    path = folder / TRAINING
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError, RecursionError) as error:
        raise RunFolderError(f"{path}: cannot be read as JSON ({error}); copy it again") from None
    return values if isinstance(values, dict) else {}


def _inside(folder: Path, name: str | None) -> Path:
    """The folder `name` of a study; one outside of it would be a file of somebody else's."""
    path = (folder / (name or "")).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise RunFolderError(f"{folder / SUMMARY}: folder {name!r} lies outside of the study; expected one in it")
    return path


def _name(folder: Path, others: Iterable[Path]) -> str:
    """What a folder is called, with as many of those above it as tell it from the others."""
    depths = range(1, len(folder.parts))
    others = [one for one in others if one != folder]
    depth = next((deep for deep in depths if all(one.parts[-deep:] != folder.parts[-deep:] for one in others)), 1)
    return "/".join(folder.parts[-depth:])
