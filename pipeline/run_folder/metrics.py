"""Reading a run's metrics.jsonl: a line a step, as a run that was killed at any moment left them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from pipeline.errors import RunFolderError

# --- Means of figures of which some may be infinite, as the perplexity of a run that diverged -----------------------


def mean(values: Sequence[float]) -> float:
    """The mean; infinite where one is."""
    return fmean(values) if all(map(math.isfinite, values)) else math.inf


def geometric_mean(values: Sequence[float]) -> float:
    """That of perplexities; infinite where one is no finite number above 0."""
    if not all(0 < value < math.inf for value in values):
        return math.inf
    return math.exp(fmean(map(math.log, values)))


def spread(values: Sequence[float]) -> float | None:
    """One standard deviation, as of a sample (n - 1); None of fewer than two, or where one is infinite."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


# --- Reading a run's metrics.jsonl: a line a step, as a run that  ---

METRICS = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, none where there is no file; one that a killed process left unfinished is left out.

    Raises:
        RunFolderError: the file cannot be read.
    """
    try:
        return _whole(path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error}); copy it again") from None


def last_metrics(path: Path, count: int, tail_bytes: int) -> list[dict[str, Any]]:
    """The same of at most the last `count` lines and `tail_bytes` bytes, oldest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - tail_bytes))
            return _whole(file.read().splitlines()[-count:])
    except FileNotFoundError:
        return []


def _whole(texts: Iterable[str | bytes]) -> list[dict[str, Any]]:
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


# --- What the validations of a run found of each corpus, from the lines of its metrics.jsonl ------------------------

# What others of the same line say, and what tells of layers, probes or time instead of a corpus.
_NOT_OF_A_CORPUS = ("perplexity_growth", "forgetting", "seconds", "kl_from_base", "base_stream_cosine")
_MEMORY = ("memory_peak_allocated_gib", "memory_peak_resident_gib")


def only_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Those of `values` that are numbers."""
    return {name: one for name, one in values.items() if isinstance(one, (int, float)) and not isinstance(one, bool)}


def _measured(values: object) -> object:
    """Figures by name without those that are no numbers; one that JSON could not hold, null, is infinite."""
    if not isinstance(values, Mapping):
        return values
    return only_numbers({name: math.inf if one is None else one for name, one in values.items()})


Figures = dict[str, Annotated[dict[str, float], BeforeValidator(_measured)]]
"""By the corpus's name, then the figure's: {"korean": {"perplexity": 9.1, ...}, ...}."""


class ValidationRecord(BaseModel):
    """What a validation found after `step` steps."""

    model_config = ConfigDict(frozen=True)

    step: int
    figures: Figures


def read_validations(lines: Iterable[Mapping[str, Any]], path: Path) -> list[ValidationRecord]:
    """Every validation in the lines of the metrics.jsonl at `path`, the one before the first step included.

    Raises:
        RunFolderError: there are fewer than two, so that nothing can be compared.
    """
    validations = [ValidationRecord(step=line["step"], figures=found) for line in lines if (found := _figures_of(line))]
    if len(validations) < 2:
        raise RunFolderError(
            f"{path}: no validation after the first; expected held-out figures of two steps at least: has the run "
            "come to its end, and has a corpus a held-out part?"
        )
    return validations


def peak_memory_gib(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """The most that the first rank held: of the GPU's memory by tensors, or on CPUs of the host's by the process."""
    return max((line[name] for line in lines for name in _MEMORY if name in line), default=None)


def _figures_of(line: Mapping[str, Any]) -> Figures:
    """The figures of each corpus in a line, which calls them `<figure>/<corpus>`."""
    found: Figures = {}
    corpora = {name.partition("/")[2] for name in line if name.startswith("perplexity/")}
    for name, value in line.items():
        figure, _, corpus = name.partition("/")
        if corpus in corpora and figure not in _NOT_OF_A_CORPUS:
            found.setdefault(corpus, {})[figure] = value
    return found
