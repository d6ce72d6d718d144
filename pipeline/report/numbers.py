"""Numbers as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeline.run_folder.averages import mean, spread

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"


def short(value: float) -> str:
    """Three digits or so: 0.034, 1.5, 17.2, 431, 12,300, 1.2e+07."""
    if not math.isfinite(value):
        return "\N{INFINITY}" if value > 0 else NOTHING
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.1e}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}".replace("-", MINUS)


def of_figure(name: str) -> Callable[[float], str]:
    """How the values of a corpus's figure are written: comparably, with as many decimals down a column."""
    if name == "perplexity":
        return lambda value: short(value) if value >= 1000 or not math.isfinite(value) else f"{value:.2f}"
    if name.endswith(("accuracy", "probability", "match")):
        return lambda value: f"{100 * value:.1f}\N{NARROW NO-BREAK SPACE}%" if math.isfinite(value) else short(value)
    return lambda value: f"{value:.3f}" if abs(value) < 1000 else short(value)


def change(nats: float) -> str:
    """A perplexity against another, from the logarithm of their ratio: −61 %, +1.5 %, ×2.3, ÷12,000."""
    if not math.isfinite(nats):
        return short(nats)
    if math.log(2) - 1e-9 <= nats or nats <= -math.log(1000) + 1e-9:
        sign = "\N{MULTIPLICATION SIGN}" if nats > 0 else "\N{DIVISION SIGN}"
        size = min(abs(nats), 700.0)  # what a float can hold
        return f"{sign}{math.exp(size):,.0f}" if math.log(99.5) <= size < 14 else f"{sign}{math.exp(size):.3g}"
    return percent(math.expm1(nats), signed=True)


def points(fraction: float) -> str:
    """A difference of two shares: +12 points."""
    return f"{100 * fraction:+.3g}".replace("-", MINUS) + "\N{NARROW NO-BREAK SPACE}points"


def percent(fraction: float, *, signed: bool = False) -> str:
    """A fraction of one: 0.5 %, 12 %; −99.9 % where the last digits matter."""
    value = 100 * fraction
    near_end = 99 < abs(value) < 100
    digits = 2 if near_end and abs(value) > 99.9 else 1 if (0 < abs(value) < 9.95 or near_end) else 0
    text = f"{value:{'+' if signed and round(value, digits) else ''}.{digits}f}"
    text = text.removesuffix(".0") if not near_end else text
    return f"{text.replace('-', MINUS)}\N{NARROW NO-BREAK SPACE}%"


def count(value: float) -> str:
    """Many: 812, 45.2 k, 1.24 M, 60 B."""
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


def plus_minus(values: Sequence[float], words: Callable[[float], str]) -> tuple[str, str]:
    """The mean, and `± spread`, empty without one, in the same words."""
    if not values:
        return NOTHING, ""
    around = spread(values)
    return words(mean(values)), "" if around is None else f"± {words(around)}"
