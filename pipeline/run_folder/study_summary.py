"""What the folder of a finished study says: summary.json, a row a method and seed, and a row a learning rate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import RunFolderError
from pipeline.files import write_json
from pipeline.run_folder.looks import Figures, Look

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
    during: list[Look] = []
    after: Figures

    @property
    def looks(self) -> list[Look]:
        """Every validation, from step 0 to the last step."""
        return [Look(step=0, figures=self.before), *self.during, Look(step=self.steps, figures=self.after)]


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
