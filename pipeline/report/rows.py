"""What a report is made of: the rows of studies' summary.json, or a run folder's own figures, with its metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from pipeline.errors import RunFolderError
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.run_folder.status import SUMMARY as TRAINING

SUMMARY = "summary.json"
REPLAY = "replay"
_FROM_TRAINING = ("trainable_parameters", "total_parameters", "tokens_seen", "seconds")
# What others of the same line say, and what tells of layers or of time instead of a corpus.
_NOT_OF_A_CORPUS = ("perplexity_growth", "forgetting", "seconds", "kl_from_base", "base_stream_cosine")


def _numbers(value: object) -> object:
    """Figures by name without those that are no numbers; one that JSON could not hold, null, is infinite."""
    if not isinstance(value, dict):
        return value
    return only_numbers({name: math.inf if one is None else one for name, one in value.items()})


def only_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Those of `values` that are numbers."""
    return {name: one for name, one in values.items() if isinstance(one, (int, float)) and not isinstance(one, bool)}


Figures = dict[str, Annotated[dict[str, float], BeforeValidator(_numbers)]]
"""By the corpus's name, then the figure's: {"korean": {"perplexity": 9.1, ...}, ...}."""


class Look(BaseModel):
    """What a validation found after `step` steps."""

    model_config = ConfigDict(frozen=True)

    step: int
    figures: Figures


class Row(BaseModel):
    """A method and seed, as a study's summary.json has it; what a reader can do without may be missing."""

    model_config = ConfigDict(frozen=True)

    label: str
    method: str | None = None
    seed: int | None = None
    learning_rate: float | None = None
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    steps: int
    tokens_seen: int | None = None
    seconds: float | None = None
    peak_memory_gib: float | None = None
    folder: str | None = None
    roles: dict[str, str]
    before: Figures
    during: list[Look] = []
    after: Figures

    @property
    def looks(self) -> list[Look]:
        """Every validation, from step 0 to the last step."""
        return [Look(step=0, figures=self.before), *self.during, Look(step=self.steps, figures=self.after)]


@dataclass(frozen=True)
class Run:
    """A row, the name of what it comes from, and the lines of its metrics.jsonl, none where that is not there."""

    row: Row
    source: str
    metrics: Sequence[Mapping[str, float]] = ()


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs of each folder: a study's, all that its summary.json lists, or a run's own.

    Raises:
        RunFolderError: a folder is neither, or what it says cannot be read.
    """
    return [run for folder in folders for run in _read(folder)]


def _read(folder: Path) -> list[Run]:
    if folder.name == SUMMARY:
        folder = folder.parent
    values = _json(folder / SUMMARY)
    if isinstance(values, list):
        return _of_study(folder, values)
    if (folder / METRICS).is_file():
        return [_of_run(folder)]
    raise RunFolderError(f"{folder}: expected a study's {SUMMARY}, a list, or a run's {METRICS}; found neither")


def _of_study(folder: Path, values: list[Any]) -> list[Run]:
    path = folder / SUMMARY
    if not values:
        raise RunFolderError(f"{path}: holds no run")
    rows = [_row(value, f"{path}: row {number}") for number, value in enumerate(values)]
    return [Run(row, _name(folder), _metrics(_inside(folder, row.folder))) for row in rows]


def _of_run(folder: Path) -> Run:
    metrics = _metrics(folder)
    looks = [(int(line["step"]), figures) for line in metrics if (figures := _figures_of(line))]
    if len(looks) < 2:
        raise RunFolderError(
            f"{folder / METRICS}: no validation after the first; a report needs held-out figures of two steps at least"
        )
    (_, before), (last, after) = looks[0], looks[-1]
    replayed = {name.partition("/")[2] for line in metrics for name in line if name.startswith("forgetting/")}
    trained = _json(folder / TRAINING)
    values = {
        **{key: trained[key] for key in _FROM_TRAINING if isinstance(trained, dict) and key in trained},
        "label": _name(folder),
        "learning_rate": max((line["learning_rate"] for line in metrics if "learning_rate" in line), default=None),
        "peak_memory_gib": _peak_memory_gib(metrics),
        "roles": {name: REPLAY if name in replayed else "new" for name in before},
        "before": before,
        "during": [{"step": step, "figures": figures} for step, figures in looks[1:-1]],
        "after": after,
        "steps": last,
    }
    return Run(_row(values, str(folder / TRAINING)), _name(folder), metrics)


def _row(values: Any, place: str) -> Row:  # noqa: ANN401
    try:
        return Row.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise RunFolderError(f"{place}: {where}: {fault['msg']}; make or copy it again") from None


def _metrics(folder: Path) -> list[dict[str, float]]:
    """The numbers of a run's metrics.jsonl; none where there is no such file."""
    try:
        lines = read_metrics(folder / METRICS)
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{folder / METRICS}: cannot be read ({error}); copy it again") from None
    numbers = [only_numbers(line) for line in lines if isinstance(line, dict)]
    return [line for line in numbers if "step" in line]


def _figures_of(line: Mapping[str, float]) -> Figures:
    """The figures of each corpus in a line of metrics.jsonl, which calls them `<figure>/<corpus>`."""
    found: Figures = {}
    corpora = [name.partition("/")[2] for name in line if name.startswith("perplexity/")]
    for name, value in line.items():
        figure, _, corpus = name.partition("/")
        if corpus in corpora and figure not in _NOT_OF_A_CORPUS:
            found.setdefault(corpus, {})[figure] = value
    return found


def _peak_memory_gib(metrics: Iterable[Mapping[str, float]]) -> float | None:
    names = ("memory_peak_allocated_gib", "memory_peak_resident_gib")
    return max((line[name] for line in metrics for name in names if name in line), default=None)


def _json(path: Path) -> Any:  # noqa: ANN401
    """What a JSON file says; None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise RunFolderError(f"{path}: cannot be read as JSON ({error}); copy it again") from None


def _inside(folder: Path, name: str | None) -> Path:
    """The folder `name` of a study; one outside of it would be a file of somebody else's."""
    path = (folder / (name or "")).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise RunFolderError(f"{folder / SUMMARY}: folder {name!r} lies outside of the study; expected one in it")
    return path


def _name(folder: Path) -> str:
    return folder.resolve().name
