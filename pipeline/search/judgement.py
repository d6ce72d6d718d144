"""Who learned most within the budget: pure functions of what the probes measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.search.candidates import Candidate

USUAL_EXPONENT = 2 / 3
"""Nats forgotten grow as this power of the steps, where only one probe is known (docs/expansion.md says from what)."""


@dataclass(frozen=True)
class Probe:
    """What one run of a candidate left: held-out perplexities, and how much the replay corpora's rose."""

    steps: int
    new_perplexity: float
    replay_perplexity: float
    replay_before: float
    """that of step 0"""
    increase: float
    """of perplexity over step 0's, as a fraction, of the replay corpus that lost most"""


@dataclass(frozen=True)
class Judged:
    """A candidate after its probes, and what they lead to expect of a whole run of `whole_steps`.

    No probes: it diverged.
    """

    candidate: Candidate
    probes: tuple[Probe, ...]
    budget: float
    whole_steps: int

    @property
    def expected_increase(self) -> float:
        """Of the replay corpora's perplexity, at the end of the whole run."""
        return expected_increase(self.probes, self.whole_steps)

    @property
    def feasible(self) -> bool:
        """Whether it is expected to keep within the budget."""
        return self.expected_increase <= self.budget

    @property
    def rank(self) -> tuple[bool, float, int, float, str]:
        """The smaller the better: within the budget what learned most, beyond it what forgets least."""
        what_counts = self.probes[-1].new_perplexity if self.feasible else self.expected_increase
        one = self.candidate
        return (not self.feasible, _finite_or_worst(what_counts), one.trained, one.learning_rate, one.shape)


def expected_increase(probes: Sequence[Probe], whole_steps: int) -> float:
    """The rise of perplexity after `whole_steps`, if nats forgotten go on to grow as a power of the steps."""
    if not probes:
        return math.inf
    last = probes[-1]
    nats = _nats(last)
    if nats <= 0 or last.steps >= whole_steps:
        return _finite_or_worst(last.increase)
    nats *= (whole_steps / last.steps) ** growth_exponent(probes)
    return math.expm1(nats) if nats < math.log(1e300) else math.inf


def growth_exponent(probes: Sequence[Probe]) -> float:
    """Of the last two probes, between 0 (nothing more is forgotten) and 1 (as much in every step)."""
    if len(probes) < 2:
        return USUAL_EXPONENT
    before, last = probes[-2:]
    nats_before, nats = _nats(before), _nats(last)
    if not (0 < nats_before < math.inf and 0 < nats < math.inf):
        return USUAL_EXPONENT
    return min(1.0, max(0.0, math.log(nats / nats_before) / math.log(last.steps / before.steps)))


def ranked(judged: Sequence[Judged]) -> list[Judged]:
    """The best first."""
    return sorted(judged, key=lambda one: one.rank)


def survivors(judged: Sequence[Judged], keep: float) -> list[Judged]:
    """The best share `keep`, and beside them the one that forgets least: what a short probe expects may be wrong."""
    if not judged:
        return []
    best_first = ranked(judged)
    kept = best_first[: max(1, math.ceil(keep * len(best_first)))]
    least = min(best_first, key=lambda one: (one.expected_increase, one.rank))
    return kept if least in kept else [*kept, least]


def _nats(probe: Probe) -> float:
    return math.log1p(_finite_or_worst(probe.increase))


def _finite_or_worst(value: float) -> float:
    return value if math.isfinite(value) else math.inf
