"""What the validations of a run found of each corpus, from the lines of its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from pipeline.errors import RunFolderError

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


class Look(BaseModel):
    """What a validation found after `step` steps."""

    model_config = ConfigDict(frozen=True)

    step: int
    figures: Figures


def looks_of(lines: Iterable[Mapping[str, Any]], path: Path) -> list[Look]:
    """Every validation in the lines of the metrics.jsonl at `path`, the one before the first step included.

    Raises:
        RunFolderError: there are fewer than two, so that nothing can be compared.
    """
    looks = [Look(step=line["step"], figures=found) for line in lines if (found := _figures_of(line))]
    if len(looks) < 2:
        raise RunFolderError(
            f"{path}: no validation after the first; expected held-out figures of two steps at least: has the run "
            "come to its end, and has a corpus a held-out part?"
        )
    return looks


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
