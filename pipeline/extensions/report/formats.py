"""How a report writes numbers and lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_SPACE = "\N{NARROW NO-BREAK SPACE}"


def number(value: float, digits: int = 2) -> str:
    """6.50, 1,234.00, 1.2·10⁷."""
    if not math.isfinite(value):
        return "\N{INFINITY}" if value > 0 else NOTHING
    if abs(value) < 1e5:
        return f"{value:,.{digits}f}"
    return power_of_ten(value, 2)


def power_of_ten(value: float, digits: int) -> str:
    """A large number in so many digits, as a person writes it: 1.2·10⁷, 10⁸."""
    factor, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if "." in factor:
        factor = factor.rstrip("0").rstrip(".")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    if factor == "1":
        return power
    return f"{factor}\N{MIDDLE DOT}{power}"


def figure_format(name: str) -> Callable[[float], str]:
    """The format of a figure's values: the same number of decimals throughout a column."""
    if name.endswith(("accuracy", "probability", "match", "ended")):
        return _share
    if name == "perplexity":
        return number
    return _three_digits


def _share(value: float) -> str:
    if math.isfinite(value):
        return f"{100 * value:.1f}{_SPACE}%"
    return number(value)


def _three_digits(value: float) -> str:
    return number(value, 3)


def change(nats: float) -> str:
    """The ratio of two perplexities, from its logarithm: −61 %, +1.5 %, ×2.3, ÷12,000."""
    if not math.isfinite(nats):
        return number(nats)
    # As a percentage from a thousandth up to twice as much: beyond, factors are easier to read.
    if -math.log(1000) < nats < math.log(2) - 1e-9:
        return percent(math.expm1(nats), "+")
    # exp of more than 709 overflows.
    ratio = math.exp(min(abs(nats), 700.0))
    sign = "\N{MULTIPLICATION SIGN}" if nats > 0 else "\N{DIVISION SIGN}"
    if ratio >= 1e6:
        return sign + power_of_ten(ratio, 3)
    if ratio >= 99.5:
        return f"{sign}{ratio:,.0f}"
    return f"{sign}{ratio:.3g}"


def percent(fraction: float, sign: str = "") -> str:
    """A fraction as a percentage: 0.5 %, 12 %, 99.9 %; with the `sign` "+" as a change: +12 %."""
    size = abs(fraction)
    # One decimal where whole percents would say 0 %, or 100 % of what is not all.
    digits = 1 if size < 0.0995 or 0.99 < size < 1 else 0
    # The sum turns −0 into 0.
    value = round(100 * fraction, digits) + 0.0
    if value == 0:
        sign = ""
    text = f"{value:{sign}.{digits}f}".removesuffix(".0")
    return f"{text.replace('-', MINUS)}{_SPACE}%"


def count(value: float) -> str:
    """A large number: 812, 45.2 k, 1.24 M, 60 B."""
    # Up to 9,999 a number is as short as with its unit.
    for least, size, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{_SPACE}{unit}"
    return f"{value:,.0f}"


def listed(names: Sequence[str]) -> str:
    """A, B and C."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def compact(value: float) -> str:
    """A value of any size in few digits: 0.0025, 1.2·10⁻⁵, 42, 45.2 k."""
    size = abs(value)
    if not math.isfinite(value) or size >= 1e15:
        return number(value)
    if size >= 1e4:
        return count(value).replace("-", MINUS)
    if size >= 1e-3 or value == 0:
        return f"{value:.4g}".replace("-", MINUS)
    return power_of_ten(value, 3).replace("-", MINUS)


def stored(size: int) -> str:
    """A number of bytes: 812 bytes, 45.2 KiB, 1.3 GiB."""
    if size < 1024:
        return f"{size}{_SPACE}bytes"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1000 or unit == "TiB":
            break
    return f"{value:,.3g}{_SPACE}{unit}" if value < 1000 else f"{value:,.0f}{_SPACE}{unit}"


def duration(seconds: float) -> str:
    """A time: 0.4 s, 1:02:03, 2 days, 3:04:05."""
    if seconds < 10:
        return f"{seconds:.1f}{_SPACE}s"
    return str(timedelta(seconds=round(seconds)))
