"""Axes, which map values to pixels and have few, round ticks; and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.run_folder.metrics import mean, spread

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
Words = Callable[[float], str]
"""How a value is written."""


def short(value: float) -> str:
    """Three digits or so: 0.034, 1.5, 17.2, 431, 12,300, 1.2e+07."""
    if not math.isfinite(value):
        return "\N{INFINITY}" if value > 0 else NOTHING
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.1e}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}".replace("-", MINUS)


def of_figure(name: str) -> Words:
    """The format of a figure's values: the same number of decimals throughout a column."""
    if name == "perplexity":
        return lambda value: short(value) if value >= 1000 or not math.isfinite(value) else f"{value:.2f}"
    if name.endswith(("accuracy", "probability", "match")):
        return lambda value: f"{100 * value:.1f}\N{NARROW NO-BREAK SPACE}%" if math.isfinite(value) else short(value)
    return lambda value: f"{value:.3f}" if abs(value) < 1000 else short(value)


def change(nats: float) -> str:
    """The ratio of two perplexities, from its logarithm: −61 %, +1.5 %, ×2.3, ÷12,000."""
    if not math.isfinite(nats):
        return short(nats)
    if math.log(2) - 1e-9 <= nats or nats <= -math.log(1000) + 1e-9:
        sign = "\N{MULTIPLICATION SIGN}" if nats > 0 else "\N{DIVISION SIGN}"
        size = min(abs(nats), 700.0)  # exp of more overflows
        return f"{sign}{math.exp(size):,.0f}" if math.log(99.5) <= size < 14 else f"{sign}{math.exp(size):.3g}"
    return percent(math.expm1(nats), signed=True)


def points(fraction: float) -> str:
    """A difference of two shares: +12 points."""
    return f"{100 * fraction:+.3g}".replace("-", MINUS) + "\N{NARROW NO-BREAK SPACE}points"


def percent(fraction: float, *, signed: bool = False) -> str:
    """A fraction as a percentage: 0.5 %, 12 %; with more digits near 100 %: −99.9 %."""
    value = 100 * fraction
    near_end = 99 < abs(value) < 100
    digits = 2 if near_end and abs(value) > 99.9 else 1 if (0 < abs(value) < 9.95 or near_end) else 0
    text = f"{value:{'+' if signed and round(value, digits) else ''}.{digits}f}"
    text = text.removesuffix(".0") if not near_end else text
    return f"{text.replace('-', MINUS)}\N{NARROW NO-BREAK SPACE}%"


def count(value: float) -> str:
    """A large number: 812, 45.2 k, 1.24 M, 60 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}\N{NARROW NO-BREAK SPACE}{unit}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min, 4.1 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        hours, rest = divmod(minutes, 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{seconds / 86400:.1f} days"


def plus_minus(values: Sequence[float], words: Words) -> tuple[str, str]:
    """The mean, and `± spread`, which is empty for a single value; `words` formats both."""
    if not values:
        return NOTHING, ""
    around = spread(values)
    return words(mean(values)), "" if around is None else f"± {words(around)}"


_LARGEST_DECADE = 307  # 5e307 is still a float


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels from `start` to `end`; `ticks` are labelled, formatted by `words`.

    `warp` is the scale's function, such as a logarithm; `low` and `high` are its results at the ends.
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
    """An axis of distances from the base, which is at 0; `wanted` ticks are taken in order while there is room."""
    low, high = _padded([0.0, *values])
    axis = Axis(low, high, start, end, (), words)
    return _with_ticks(axis, [value for value in wanted if low <= value <= high], gap=76 if start < end else 30)


def axis_from_zero(values: Iterable[float], start: float, end: float) -> Axis:
    """A linear axis from 0, or from below 0 where there are negative `values`."""
    found = [0.0, *values]
    low, high = min(found), _padded(found)[1]
    ticks = _even(low, high, max(2, int(abs(end - start) / 36)))
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]))) if len(ticks) > 1 else 2
    return Axis(low, high, start, end, ticks, lambda value: f"{value:.{digits}f}" if value else "0")


def step_axis(steps: Iterable[float], start: float, end: float) -> Axis:
    """An axis of training steps, from 0."""
    high = max([1.0, *steps])
    return Axis(0.0, high, start, end, _even(0.0, high, max(2, int((end - start) / 70))), count)


def layer_axis(layers: Iterable[float], start: float, end: float) -> Axis:
    """An axis of layers, from 1."""
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


def share_axis(_: Iterable[float], start: float, end: float) -> Axis:
    """An axis of shares, from 0 to 1 whatever the values."""
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
    """About `room` ticks at most: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / room
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def round_changes(sign: int = 1) -> list[float]:
    """Logarithms of round ratios, the roundest first; with a `sign` of −1 their opposites."""
    powers = range(2, 13)
    rises = [1.0, 9.0, *(10.0**power - 1 for power in powers), 0.5, 4.0, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.3, 2.0]
    falls = [0.5, 0.9, *(1 - 10.0**-power for power in powers), 0.2, 0.8, 0.1, 0.95, 0.6, 0.3, 0.7, 0.4, 0.98, 0.05]
    return [0.0, *(sign * math.log1p(rise) for rise in rises), *(sign * math.log1p(-fall) for fall in falls)]


def round_points(sign: int = 1) -> list[float]:
    """Round differences of shares, the roundest first; with a `sign` of −1 their opposites."""
    sizes = (1.0, 0.2, 0.4, 0.6, 0.8, 0.5, 0.1, 0.3, 0.7, 0.9, 0.05, 0.02, 0.01)
    return [0.0, *(sign * size for size in sizes), *(-sign * size for size in sizes)]


def _with_ticks(axis: Axis, wanted: Sequence[float], gap: float) -> Axis:
    """The axis with as many of `wanted` as keep `gap` pixels apart, taken in order."""
    kept: list[float] = []
    for tick in wanted:
        if all(abs(axis(tick) - axis(other)) >= gap for other in kept):
            kept.append(tick)
    return Axis(axis.low, axis.high, axis.start, axis.end, sorted(kept), axis.words, axis.warp)
