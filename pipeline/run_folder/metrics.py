"""Reads a run's metrics.jsonl, one line per step, even after a kill; means and spreads of
figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict

from pipeline.errors import RunFolderError

METRICS = "metrics.jsonl"
# Figures derived from others of the same line, or of a phase instead of a corpus.
_NOT_OF_A_CORPUS = ("forgetting", "seconds", "kl_from_base")
_MEMORY = ("memory_peak_allocated_gib", "memory_peak_resident_gib")


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; infinite if a value is, such as the perplexity of a run that
    diverged.
    """
    return fmean(values) if all(map(math.isfinite, values)) else math.inf


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; infinite unless all values are finite and above 0."""
    if not all(0 < value < math.inf for value in values):
        return math.inf
    return math.exp(fmean(map(math.log, values)))


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample (n - 1); None for fewer than two values, or if one is
    infinite.
    """
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def read_metrics(path: Path, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, none if there is no file, without the unfinished lines of
    killed processes.

    `tail_bytes`: reads no more than these at its end.
    """
    return list(_lines(path, tail_bytes)) if path.exists() else []


def _lines(path: Path, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        if tail_bytes is not None:
            file.seek(max(0, file.seek(0, 2) - tail_bytes))
        for text in file:
            with suppress(orjson.JSONDecodeError):
                line = orjson.loads(text)
                if isinstance(line, dict) and "step" in line:
                    yield line


def only_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Those of `values` that are numbers."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _measured(values: object) -> object:
    """The numbers among `values`; null stands for infinity, which JSON cannot hold."""
    if not isinstance(values, Mapping):
        return values
    return only_numbers(
        {name: math.inf if value is None else value for name, value in values.items()}
    )


Figures = dict[str, Annotated[dict[str, float], BeforeValidator(_measured)]]
"""By corpus and figure: {"korean": {"perplexity": 9.1, ...}, ...}."""


class ValidationRecord(BaseModel):
    """The held-out figures after `step` steps."""

    model_config = ConfigDict(frozen=True)

    step: int
    figures: Figures


class History(NamedTuple):
    """What the metrics.jsonl of a run says of the whole run, None where it does not."""

    validations: list[ValidationRecord]
    """all of them, the one at step 0 included"""
    forgetting: set[str]
    """the corpora with figures of forgetting"""
    learning_rate: float | None
    """the highest"""
    peak_memory_gib: float | None
    """of rank 0: GPU memory of its tensors, or on CPUs host memory of its process"""


def read_history(path: Path, *, validated: bool = True) -> History:
    """Reads a metrics.jsonl and keeps none of its lines, of which there may be a million.

    Raises:
        RunFolderError: it is to be `validated`, and has fewer than two validations.
    """
    validations: list[ValidationRecord] = []
    highest: dict[str, float] = {}
    forgetting: set[str] = set()
    for line in _lines(path) if path.exists() else ():
        for name, value in only_numbers(
            {name: line.get(name) for name in ("learning_rate", *_MEMORY)}
        ).items():
            highest[name] = max(value, highest.get(name, value))
        forgetting |= {name.partition("/")[2] for name in line if name.startswith("forgetting/")}
        # The figures of a validation are named `<figure>/<corpus>`.
        figures: Figures = {
            name.removeprefix("perplexity/"): {} for name in line if name.startswith("perplexity/")
        }
        if figures:
            for name, value in line.items():
                figure, _, corpus = name.partition("/")
                if corpus in figures and figure not in _NOT_OF_A_CORPUS:
                    figures[corpus][figure] = value
            validations.append(ValidationRecord(step=line["step"], figures=figures))
    if validated and len(validations) < 2:
        raise RunFolderError(
            f"{path}: no validation after the first; expected held-out figures of at least two "
            "steps: did the run "
            "finish, and has a corpus a held-out part?"
        )
    memory = max((highest[name] for name in _MEMORY if name in highest), default=None)
    return History(validations, forgetting, highest.get("learning_rate"), memory)
