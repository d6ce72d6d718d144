"""Means of figures of which some may be infinite, as the perplexity of a run that diverged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev


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
