"""Reads a run's metrics.jsonl, which has a line per step; means and spreads of figures."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict

from pipeline.errors import RunFolderError

METRICS = "metrics.jsonl"
# Figures that `Figures` leaves out: they are computed from others of the same line, or their name
# ends with a phase of the step and not with a corpus.
_NOT_OF_A_CORPUS = ("forgetting", "seconds", "kl_from_base")
_TAILS = (2**18, 2**21, 2**24)
_MEMORY = ("memory_peak_allocated_gib", "memory_peak_resident_gib")


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; infinite if a value is, as the perplexity of a diverged run."""
    if not all(map(math.isfinite, values)):
        return math.inf
    return fmean(values)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; infinite unless all values are finite and above 0."""
    if not all(0 < value < math.inf for value in values):
        return math.inf
    return math.exp(fmean(map(math.log, values)))


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample (n - 1).

    None for fewer than two values, or if one is infinite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return stdev(values)


def readable(perplexity: float) -> str:
    """A perplexity with two decimals, or in scientific notation if it is very large."""
    return f"{perplexity:.2f}" if perplexity < 1e5 else f"{perplexity:.1e}"


def read_metrics(path: Path, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without the unfinished lines of killed processes.

    Empty if there is no file.

    Args:
        tail_bytes: how much of the file is read, at its end; by default all.
    """
    if not path.exists():
        return []
    return list(_lines(path, tail_bytes))


def _lines(path: Path, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        if tail_bytes is not None:
            end = file.seek(0, os.SEEK_END)
            # A status is asked for every few seconds, and the file may have a line for each of a
            # million steps.
            file.seek(max(0, end - tail_bytes))
        for text in file:
            # A kill cuts a line short, and so does a tail that begins within a line.
            with suppress(orjson.JSONDecodeError):
                line = orjson.loads(text)
                if isinstance(line, dict) and "step" in line:
                    yield line


def only_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """The entries of `values` that are numbers."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[name] = value
    return numbers


def _measured(values: object) -> object:
    """The numbers among `values`; null stands for infinity, which JSON cannot hold."""
    if not isinstance(values, Mapping):
        return values
    filled = {name: math.inf if value is None else value for name, value in values.items()}
    return only_numbers(filled)


Figures = dict[str, Annotated[dict[str, float], BeforeValidator(_measured)]]
"""By corpus and figure: {"korean": {"perplexity": 9.1, ...}, ...}."""


class ValidationRecord(BaseModel):
    """The held-out figures after `step` steps."""

    model_config = ConfigDict(frozen=True)

    step: int
    figures: Figures


def validation_at_start(path: Path) -> dict[str, Any] | None:
    """The first line of a metrics.jsonl if it is that of step 0; None where there is none."""
    if not path.exists():
        return None
    for line in _lines(path):
        return line if line["step"] == 0 else None
    return None


def recent_validations(path: Path, count: int) -> list[ValidationRecord]:
    """The validation before the first step, and the last `count`, of a metrics.jsonl.

    It is read from its end, in steps, and never more than 16 MiB of it: there may be fewer.
    """
    start = validation_at_start(path)
    if start is None:
        return []
    records: list[ValidationRecord] = []
    for tail_bytes in _TAILS:
        records = []
        for line in read_metrics(path, tail_bytes):
            figures = _validation_figures(line)
            if figures and line["step"] > 0:
                records.append(ValidationRecord(step=line["step"], figures=figures))
        if len(records) >= count or tail_bytes >= path.stat().st_size:
            break
    first = ValidationRecord(step=0, figures=_validation_figures(start))
    return [first, *records[-count:]]


class History(NamedTuple):
    """What the metrics.jsonl of a run says of the whole run; None where it does not.

    Attributes:
        validations: all validations, the one at step 0 included.
        forgetting: the corpora with figures of forgetting.
        learning_rate: the highest learning rate.
        peak_memory_gib: the highest memory of rank 0: on a GPU its tensors, on a CPU the host
            memory of its process.
    """

    validations: list[ValidationRecord]
    forgetting: set[str]
    learning_rate: float | None
    peak_memory_gib: float | None


def read_history(path: Path, *, validated: bool = True) -> History:
    """Reads a metrics.jsonl and keeps none of its lines, of which there may be a million.

    Raises:
        RunFolderError: it is to be `validated`, and has fewer than two validations.
    """
    validations: list[ValidationRecord] = []
    forgetting: set[str] = set()
    learning_rate: float | None = None
    peak_memory_gib: float | None = None
    for line in _lines(path) if path.exists() else ():
        learning_rate = _highest(learning_rate, line, ("learning_rate",))
        peak_memory_gib = _highest(peak_memory_gib, line, _MEMORY)
        for name in line:
            figure, _, corpus = name.partition("/")
            if figure == "forgetting":
                forgetting.add(corpus)
        figures = _validation_figures(line)
        if figures:
            validations.append(ValidationRecord(step=line["step"], figures=figures))
    if validated and len(validations) < 2:
        raise RunFolderError(
            f"{path}: no validation after the first; expected held-out figures of at least two "
            "steps: did the run finish, and has a corpus a held-out part?"
        )
    return History(validations, forgetting, learning_rate, peak_memory_gib)


def _highest(
    highest: float | None, line: Mapping[str, object], names: Sequence[str]
) -> float | None:
    """The highest of `highest` and the numbers `names` of a line."""
    numbers = only_numbers({name: line.get(name) for name in names})
    for value in numbers.values():
        if highest is None or value > highest:
            highest = value
    return highest


def _validation_figures(line: Mapping[str, Any]) -> Figures:
    """The figures of a line by corpus; empty if its step has no validation.

    In the line they are named `<figure>/<corpus>`.
    """
    figures: Figures = {}
    for name in line:
        figure, _, corpus = name.partition("/")
        if figure == "perplexity":
            figures[corpus] = {}
    for name, value in line.items():
        figure, _, corpus = name.partition("/")
        if corpus in figures and figure not in _NOT_OF_A_CORPUS:
            figures[corpus][figure] = value
    return figures
