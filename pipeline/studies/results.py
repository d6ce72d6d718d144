"""What finished runs and studies leave in their folders: metrics of a run; summary.json and learning_rates.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config.data import Role
from pipeline.config.method import ScaleMethod
from pipeline.errors import RunFolderError, in_one_line
from pipeline.files import read_object, read_text, write_json
from pipeline.run_folder.metrics import (
    METRICS,
    Figures,
    ValidationRecord,
    geometric_mean,
    peak_memory_gib,
    read_metrics,
    read_validations,
)
from pipeline.run_folder.status import TRAINING
from pipeline.studies.study_runs import StudyRun, Trial, measured_corpora
from pipeline.training.divergence import REPORT as DIVERGENCE

SUMMARY = "summary.json"
LEARNING_RATES = "learning_rates.json"
REPLAY = "replay"
"""The role of corpora that must not be forgotten."""
_FROM_TRAINING = ("trainable_parameters", "total_parameters", "steps", "tokens_seen", "seconds")


class Row(BaseModel):
    """A row of summary.json: a method and seed at its chosen rate. Files from elsewhere may lack what is optional."""

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
    during: list[ValidationRecord] = []
    after: Figures

    @property
    def validations(self) -> list[ValidationRecord]:
        """Every validation, from step 0 to the last step."""
        first = ValidationRecord(step=0, figures=self.before)
        return [first, *self.during, ValidationRecord(step=self.steps, figures=self.after)]


class Tried(BaseModel):
    """A row of learning_rates.json: a method at one rate of its grid. Perplexities are means over a role's corpora."""

    model_config = ConfigDict(frozen=True)

    label: str
    learning_rate: float
    seed: int | None = None
    new_perplexity: float | None = None
    replay_perplexity: float | None = None
    after: Figures
    chosen: bool
    at_the_edge: bool

    @property
    def diverged(self) -> bool:
        return not self.after


@dataclass(frozen=True)
class Outcome:
    """What a finished run left: training.json, every validation from step 0 to the last step, and its peak memory."""

    run: StudyRun
    training: Mapping[str, Any]
    validations: list[ValidationRecord]
    peak_memory_gib: float | None

    @property
    def before(self) -> Figures:
        return self.validations[0].figures

    @property
    def after(self) -> Figures:
        return self.validations[-1].figures

    def perplexity(self, role: Role, figures: Figures) -> float | None:
        """The geometric mean over a role's held-out corpora, infinite where one is; None without any."""
        names = measured_corpora(self.run.config, role)
        return geometric_mean([figures[name]["perplexity"] for name in names]) if names else None

    def row(self, trial: Trial, label: str, study_folder: Path) -> Row:
        """The run's row of summary.json."""
        config = self.run.config
        method = config.method
        return Row(
            label=label,
            method=method.variant if isinstance(method, ScaleMethod) else method.name,
            seed=trial.seed,
            learning_rate=trial.learning_rate,
            **{key: self.training[key] for key in _FROM_TRAINING},
            peak_memory_gib=self.peak_memory_gib,
            folder=str(config.folder.relative_to(study_folder)),
            roles={name: corpus.role for name, corpus in config.data.corpora.items()},
            before=self.before,
            during=self.validations[1:-1],
            after=self.after,
        )


def read_outcome(run: StudyRun) -> Outcome:
    """What a finished run left.

    Raises:
        RunFolderError: its metrics are missing or damaged.
    """
    path = run.config.folder / METRICS
    lines = read_metrics(path)
    return Outcome(run, _training(run), read_validations(lines, path), peak_memory_gib(lines))


def is_trained(run: StudyRun) -> bool:
    """Whether the run is trained to its end, at its last step or before.

    Raises:
        ConfigError: its folder holds a trained run with other settings.
    """
    if not (run.config.folder / TRAINING).exists():
        return False
    run.check_same()
    return True


def has_diverged(run: StudyRun) -> bool:
    """Whether the run ended because its loss diverged."""
    return (run.config.folder / DIVERGENCE).exists() and not is_trained(run)


def read_rows(folder: Path) -> list[Row]:
    """The rows of a study's summary.json, at least one.

    Raises:
        RunFolderError: the study is not finished, or the file is damaged or of another format.
    """
    return _read(folder / SUMMARY, Row)


def read_tried(folder: Path) -> list[Tried]:
    """The rows of its learning_rates.json; raises what `read_rows` does."""
    return _read(folder / LEARNING_RATES, Tried)


def write_summary(folder: Path, rows: Sequence[Row], tried: Sequence[Tried]) -> None:
    """Writes both files; infinite values are null in them."""
    # summary.json last: where it exists, the rates exist too.
    write_json(folder / LEARNING_RATES, [row.model_dump() for row in tried])
    write_json(folder / SUMMARY, [row.model_dump() for row in rows])


RowType = TypeVar("RowType", Row, Tried)


def checked_row(kind: type[RowType], values: object, place: str) -> RowType:
    """`values` as a row.

    Raises:
        RunFolderError: they are not a row; it names `place`, where they were read.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ": ".join(filter(None, [place, ".".join(map(str, fault["loc"]))]))
        raise RunFolderError(f"{where}: {fault['msg']}; write or copy the file again") from None


def _read(path: Path, kind: type[RowType]) -> list[RowType]:
    try:
        # Not orjson: NaN and Infinity, which other programs write, have their meaning here.
        values = json.loads(read_text(path, RunFolderError))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path}: not JSON ({in_one_line(error):.100}); write or copy the file again") from None
    except FileNotFoundError:
        raise RunFolderError(
            f"{path}: no such file; tools/run_study.py writes it when the study is finished: run it again"
        ) from None
    if not isinstance(values, list):
        raise RunFolderError(f"{path}: expected a list of rows, found {type(values).__name__}; is it a study's?")
    if not values:
        raise RunFolderError(f"{path}: expected at least one row, found none")
    return [checked_row(kind, value, f"{path}: row {number}") for number, value in enumerate(values)]


def _training(run: StudyRun) -> Mapping[str, Any]:
    return read_object(run.config.folder / TRAINING, RunFolderError)
