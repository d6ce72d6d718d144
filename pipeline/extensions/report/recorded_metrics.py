"""What the metrics.jsonl of a run holds, as lines to draw."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pipeline.extensions.report.figures.labels import Point
from pipeline.run_folder.metrics import (
    METRICS,
    ValidationRecord,
    is_step_line,
    only_numbers,
    validation_figures,
)

_OF_STEPS = ("loss", "kl", "learning_rate", "gradient_norm", "tokens_per_second_per_gpu")
_MEMORY = ("memory_peak_reserved_gib", "memory_peak_allocated_gib", "memory_peak_resident_gib")
_PHASE = "seconds"
_OF_CORPORA = ("forgetting", "kl_from_base", "changed_top_tokens", _PHASE)
"""Figures of corpora and phases whose names look like those of tasks."""


@dataclass
class Curve:
    """The values of a figure by step. A run may have a million of them."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step; a step that is computed again replaces those from it on."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)

    def points(self) -> list[Point]:
        return list(zip(self.steps, self.values, strict=True))


@dataclass
class RunMetrics:
    """The figures of a run.

    Attributes:
        curves: by the name of the figure.
        tasks: the scores of benchmarks during training, by `<figure>/<task>`.
        seconds: the time of all steps by phase.
        peak_memory_gib: the highest memory of rank 0.
        trained_on_gpus: whether that is a GPU's.
        damaged: the numbers of the lines that are no figures of a step, from 1.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    tasks: dict[str, Curve] = field(default_factory=dict)
    validations: list[ValidationRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_gib: float | None = None
    trained_on_gpus: bool = False
    damaged: list[int] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds the line of a step."""
        step: int = line["step"]
        figures = validation_figures(line)
        if figures:
            self._add_validation(ValidationRecord(step=step, figures=figures))
        for name, value in only_numbers(line).items():
            figure, _, subject = name.partition("/")
            if name in _OF_STEPS:
                self.curves.setdefault(name, Curve()).add(step, value)
            elif name in _MEMORY:
                self.peak_memory_gib = max(value, self.peak_memory_gib or 0.0)
                self.trained_on_gpus = not name.endswith("resident_gib")
            elif figure == _PHASE:
                self.seconds[subject] = self.seconds.get(subject, 0.0) + value
            elif subject and subject not in figures and figure not in _OF_CORPORA:
                self.tasks.setdefault(name, Curve()).add(step, value)

    def _add_validation(self, validation: ValidationRecord) -> None:
        while self.validations and self.validations[-1].step >= validation.step:
            self.validations.pop()
        self.validations.append(validation)

    def perplexities(self, corpus: str) -> list[Point]:
        """The held-out perplexities of a corpus by step, as far as they are finite."""
        points: list[Point] = []
        for validation in self.validations:
            value = validation.figures.get(corpus, {}).get("perplexity", math.inf)
            if 0 < value < math.inf:
                points.append((float(validation.step), value))
        return points

    @property
    def corpora(self) -> list[str]:
        """The corpora that a validation scored."""
        names: dict[str, None] = {}
        for validation in self.validations:
            names.update(dict.fromkeys(validation.figures))
        return list(names)


def read_run_metrics(folder: Path) -> RunMetrics:
    """The figures of the run in `folder`; none where it has not made a step.

    A damaged line is left out, and its number is kept.
    """
    found = RunMetrics()
    path = folder / METRICS
    if not path.exists():
        return found
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            line = _parsed(text)
            if line is not None:
                found.add(line)
            elif text.endswith(b"\n"):
                # Without its end it is the line that the run is writing now.
                found.damaged.append(number)
    return found


def _parsed(text: bytes) -> dict[str, Any] | None:
    """The line of a step; None for anything else."""
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return line if is_step_line(line) else None


# --- Many points in few ---------------------------------------------------------------------------


def extremes(points: Sequence[Point], bins: int) -> list[Point]:
    """The lowest and the highest point of each of so many bins: no spike is lost."""
    kept: list[Point] = []
    for part in _parts(points, bins):
        low = min(part, key=lambda point: point[1])
        high = max(part, key=lambda point: point[1])
        kept += sorted({low, high})
    return kept


def means(points: Sequence[Point], bins: int) -> list[Point]:
    """The mean of each of so many bins, at the last step of the bin."""
    averaged: list[Point] = []
    for part in _parts(points, bins):
        total = math.fsum(value for _, value in part)
        averaged.append((part[-1][0], total / len(part)))
    return averaged


def _parts(points: Sequence[Point], bins: int) -> list[Sequence[Point]]:
    """`points` in at most so many parts of equal length."""
    length = math.ceil(len(points) / bins)
    return [points[first : first + length] for first in range(0, len(points), max(1, length))]
