"""What a finished run left in its folder, read once: how its row of the study's summary is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config.method import Method, ScaleMethod
from pipeline.config.run import Role
from pipeline.errors import RunFolderError
from pipeline.experiments.study_runs import StudyRun, Trial, measured_corpora
from pipeline.files import write_json
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
from pipeline.training.divergence import REPORT as DIVERGENCE

# --- What the folder of a finished study says: summary.json, a row a method and seed, and a row a learning rate -----

SUMMARY = "summary.json"
LEARNING_RATES = "learning_rates.json"
REPLAY = "replay"
"""The role of what must not be forgotten."""


class Row(BaseModel):
    """A method and seed at the chosen learning rate; what a reader can do without may be missing."""

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
        return [
            ValidationRecord(step=0, figures=self.before),
            *self.during,
            ValidationRecord(step=self.steps, figures=self.after),
        ]


class Tried(BaseModel):
    """A method at one learning rate of its grid, with the first seed; perplexities are of a role's corpora together."""

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
        """Whether it came to no end that could be measured."""
        return not self.after


def read_rows(folder: Path) -> list[Row]:
    """The rows of a study's summary.json, one at least.

    Raises:
        RunFolderError: the study is not finished, or its summary is damaged or of another shape.
    """
    return _read(folder / SUMMARY, Row)


def read_tried(folder: Path) -> list[Tried]:
    """Those of its learning_rates.json; raises what `read_rows` does."""
    return _read(folder / LEARNING_RATES, Tried)


def write_summary(folder: Path, rows: Sequence[Row], tried: Sequence[Tried]) -> None:
    """Writes both files; what is infinite is null in them."""
    # The rows last: who finds them finds the rates too.
    write_json(folder / LEARNING_RATES, [one.model_dump() for one in tried])
    write_json(folder / SUMMARY, [one.model_dump() for one in rows])


R = TypeVar("R", Row, Tried)


def _read(path: Path, kind: type[R]) -> list[R]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(
            f"{path}: no such file; tools/run_study.py writes it when the study is finished: the same command goes on"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise RunFolderError(f"{path}: cannot be read as JSON ({error}); copy it again") from None
    if not isinstance(values, list):
        raise RunFolderError(f"{path}: expected a list, a row a run, found {type(values).__name__}; is it a study's?")
    if not values:
        raise RunFolderError(f"{path}: holds no run")
    return [checked_row(kind, value, f"{path}: row {number}") for number, value in enumerate(values)]


def checked_row(kind: type[R], values: object, place: str) -> R:
    """`values` as a row; raises RunFolderError where they are none, with `place` for where they stood."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ": ".join(filter(None, [place, ".".join(map(str, fault["loc"]))]))
        raise RunFolderError(f"{where}: {fault['msg']}; make or copy it again") from None


# --- What a finished run left in its folder, read once: how its r ---

_FROM_TRAINING = ("trainable_parameters", "total_parameters", "steps", "tokens_seen", "seconds")


@dataclass(frozen=True)
class Outcome:
    """What a finished run left: the trainer's figures, and every validation from step 0 to the last step."""

    run: StudyRun
    training: Mapping[str, Any]
    validations: list[ValidationRecord]
    peak_memory_gib: float | None

    @property
    def before(self) -> Figures:
        """What the base knew."""
        return self.validations[0].figures

    @property
    def after(self) -> Figures:
        """What is known at the end."""
        return self.validations[-1].figures

    def perplexity(self, role: Role, figures: Figures) -> float | None:
        """Of a role's held-out corpora in `figures`: the geometric mean, infinite where one is; None without any."""
        names = measured_corpora(self.run.config, role)
        return geometric_mean([figures[name]["perplexity"] for name in names]) if names else None

    def row(self, trial: Trial, label: str, study_folder: Path) -> Row:
        """Its row of the study's summary."""
        config = self.run.config
        return Row(
            label=label,
            method=short_name(config.method),
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
        RunFolderError: its figures are gone or damaged.
    """
    path = run.config.folder / METRICS
    lines = read_metrics(path)
    return Outcome(run, _training(run), read_validations(lines, path), peak_memory_gib(lines))


def is_trained(run: StudyRun) -> bool:
    """Whether the run has come to its end.

    Raises:
        ConfigError: one has in its folder, but with other settings.
    """
    if not (run.config.folder / TRAINING).exists():
        return False
    run.check_same()
    return int(_training(run)["steps"]) >= run.config.schedule.steps


def has_diverged(run: StudyRun) -> bool:
    """Whether the run left the road and did not come to its end."""
    return (run.config.folder / DIVERGENCE).exists() and not is_trained(run)


def short_name(method: Method) -> str:
    """fft, freeze, lora, llama_pro; of SCALE the variant."""
    return method.variant if isinstance(method, ScaleMethod) else method.name


def _training(run: StudyRun) -> Mapping[str, Any]:
    values: Mapping[str, Any] = json.loads((run.config.folder / TRAINING).read_text(encoding="utf-8"))
    return values
