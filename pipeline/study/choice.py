"""Which learning rate a method is compared at: chosen by what was learned alone, whatever was forgotten."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def best_learning_rate(perplexities: Mapping[float, float]) -> float:
    """The rate with the lowest perplexity; of equal ones the smaller. A run without a finite one is the worst."""
    finite = {rate: value if math.isfinite(value) else math.inf for rate, value in perplexities.items()}
    return min(sorted(finite), key=finite.__getitem__)


def is_at_the_edge(rate: float, grid: Sequence[float]) -> bool:
    """Whether a better one may lie outside of the grid, if that has an outside."""
    return len(grid) > 1 and rate in (min(grid), max(grid))
