"""Axes: from figures to pixels, and the few round figures that are written beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.report.numbers import count, percent

Words = Callable[[float], str]
_LARGEST_DECADE = 307  # that a float can hold, five times over too


@dataclass(frozen=True)
class Axis:
    """Figures on pixels from `start` to `end`; `ticks` are those that are written, in `words`.

    `low` and `high` are what `warp` makes of the figures at the ends.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    words: Words
    warp: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        return self.start + (self.warp(value) - self.low) / (self.high - self.low) * (self.end - self.start)


def distance_axis(values: Iterable[float], start: float, end: float, words: Words, wanted: Sequence[float]) -> Axis:
    """Distances from the base, which is at 0; those of `wanted` are written that have room, the first first."""
    low, high = _padded([0.0, *values])
    axis = Axis(low, high, start, end, (), words)
    return _with_ticks(axis, [value for value in wanted if low <= value <= high], gap=76 if start < end else 30)


def axis_from_zero(values: Iterable[float], start: float, end: float) -> Axis:
    """An even axis from 0, or below it where `values` are."""
    found = [0.0, *values]
    low, high = min(found), _padded(found)[1]
    ticks = _even(low, high, max(2, int(abs(end - start) / 36)))
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]))) if len(ticks) > 1 else 2
    return Axis(low, high, start, end, ticks, lambda value: f"{value:.{digits}f}" if value else "0")


def step_axis(steps: Iterable[float], start: float, end: float) -> Axis:
    """Training steps, from 0."""
    high = max([1.0, *steps])
    return Axis(0.0, high, start, end, _even(0.0, high, max(2, int((end - start) / 70))), count)


def layer_axis(layers: Iterable[float], start: float, end: float) -> Axis:
    """Layers, from the first."""
    high = max([2.0, *layers])
    axis = Axis(1.0, high, start, end, (), count)
    return _with_ticks(axis, [1.0, high, *(float(layer) for layer in range(2, int(high)))], gap=26)


def log_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """A logarithmic axis over `values`, all above 0."""
    low, high = _padded([math.log10(value) for value in values])
    if high - low < 0.7:
        ticks: Sequence[float] = _even(10**low, 10**high, 8)
    else:
        decades = range(math.floor(low), min(math.ceil(high), _LARGEST_DECADE) + 1)
        ticks = [10.0**decade * step for step in (1, 3, 2, 5) for decade in decades]
    axis = Axis(low, high, start, end, (), _of_perplexity, math.log10)
    return _with_ticks(axis, [tick for tick in ticks if low <= math.log10(tick) <= high], gap=26)


def share_axis(start: float, end: float) -> Axis:
    """From nothing to all."""
    return Axis(0.0, 1.0, start, end, (0.0, 0.25, 0.5, 0.75, 1.0), percent)


def _of_perplexity(value: float) -> str:
    if value >= 1e5:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.6g}"


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.07 * (high - low) or 0.05
    return low - room, high + room


def _even(low: float, high: float, room: int) -> list[float]:
    """At most about `room` multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / room
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def round_changes(sign: int = 1) -> list[float]:
    """Logarithms of ratios, the roundest first; or their opposites."""
    powers = range(2, 13)
    rises = [1.0, 9.0, *(10.0**power - 1 for power in powers), 0.5, 4.0, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.3, 2.0]
    falls = [0.5, 0.9, *(1 - 10.0**-power for power in powers), 0.2, 0.8, 0.1, 0.95, 0.6, 0.3, 0.7, 0.4, 0.98, 0.05]
    return [0.0, *(sign * math.log1p(rise) for rise in rises), *(sign * math.log1p(-fall) for fall in falls)]


def round_points(sign: int = 1) -> list[float]:
    """Differences of shares, the roundest first; or their opposites."""
    sizes = (1.0, 0.2, 0.4, 0.6, 0.8, 0.5, 0.1, 0.3, 0.7, 0.9, 0.05, 0.02, 0.01)
    return [0.0, *(sign * size for size in sizes), *(-sign * size for size in sizes)]


def _with_ticks(axis: Axis, wanted: Sequence[float], gap: float) -> Axis:
    """The axis with those of `wanted` that have room, the first first."""
    kept: list[float] = []
    for tick in wanted:
        if all(abs(axis(tick) - axis(other)) >= gap for other in kept):
            kept.append(tick)
    return Axis(axis.low, axis.high, axis.start, axis.end, sorted(kept), axis.words, axis.warp)
