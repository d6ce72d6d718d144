"""How a report writes numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
_SPACE = "\N{NARROW NO-BREAK SPACE}"


def short(value: float) -> str:
    """Three digits or so: 0.034, 1.50, 17.2, 12,300, 1.2e+07."""
    if not math.isfinite(value):
        return "\N{INFINITY}" if value > 0 else NOTHING
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.1e}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}".replace("-", MINUS)


def of_figure(name: str) -> Callable[[float], str]:
    """The format of a figure's values: the same number of decimals throughout a column."""
    if name.endswith(("accuracy", "probability", "match", "ended")):
        return lambda value: f"{100 * value:.1f}{_SPACE}%" if math.isfinite(value) else short(value)
    digits = 2 if name == "perplexity" else 3
    return lambda value: f"{value:.{digits}f}" if abs(value) < 1000 else short(value)


def change(nats: float) -> str:
    """The ratio of two perplexities, from its logarithm: −61 %, +1.5 %, ×2.3, ÷12,000."""
    if not math.isfinite(nats):
        return short(nats)
    if -math.log(1000) < nats < math.log(2) - 1e-9:
        return percent(math.expm1(nats), "+")
    ratio = math.exp(min(abs(nats), 700.0))  # exp of more overflows
    sign = "\N{MULTIPLICATION SIGN}" if nats > 0 else "\N{DIVISION SIGN}"
    return sign + (f"{ratio:,.0f}" if 99.5 <= ratio < 1e6 else f"{ratio:.3g}")


def points(fraction: float) -> str:
    """A difference of two shares: +12 points."""
    return f"{100 * fraction:+.3g}{_SPACE}points".replace("-", MINUS)


def percent(fraction: float, sign: str = "") -> str:
    """A fraction as a percentage: 0.5 %, 12 %, 99.9 %; with the `sign` "+" as a change: +12 %."""
    digits = 1 if abs(fraction) < 0.0995 or 0.99 < abs(fraction) < 1 else 0
    value = round(100 * fraction, digits) + 0.0  # not −0
    text = f"{value:{sign if value else ''}.{digits}f}".removesuffix(".0")
    return f"{text.replace('-', MINUS)}{_SPACE}%"


def count(value: float) -> str:
    """A large number: 812, 45.2 k, 1.24 M, 60 B."""
    for least, size, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{_SPACE}{unit}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min, 4.1 days."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{seconds / 86400:.1f} days"
