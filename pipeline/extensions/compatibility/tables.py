"""The tables of what goes together, made by asking for every pair."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from pipeline.extensions.compatibility.ask import format_refusals, refusal
from pipeline.extensions.compatibility.features import (
    BASES,
    FEATURES,
    METHODS,
    SETTINGS,
    WITHOUT_GATE,
    contradicts,
)
from pipeline.extensions.compatibility.legend import table_head, table_row

WORKS = "·"
ROWS_OF_BASES: Sequence[tuple[str, ...]] = (
    *((name,) for name in METHODS),
    ("lora", "target modules"),
    *((name,) for name in SETTINGS),
    ("kept products",),
)
TRAINED: Sequence[tuple[str, ...]] = (
    ("preserve", "norm: base"),
    ("adapt", "norm: base"),
    ("adapt",),
    ("route", "norm: base"),
    ("fft",),
    ("freeze",),
    ("lora",),
    ("llama_pro",),
    ("adapt", "norm: base", "vocabulary"),
    ("lora", "vocabulary"),
    ("adapt", "norm: base", "gate"),
    ("fft", "gate"),
    ("fft", "gate", "mixture"),
    ("fft", "gate", "widened"),
    ("lora", "gate"),
    ("adapt", "norm: base", "open rows"),
    ("adapt", "norm: base", "open rows", WITHOUT_GATE),
    ("adapt", "norm: base", "open gains", WITHOUT_GATE),
    ("adapt", "norm: base", "open gains", WITHOUT_GATE, "Qwen3"),
    ("adapt", "norm: base", "low rank", WITHOUT_GATE),
    ("lora", "open rows"),
    ("lora", "open rows", WITHOUT_GATE),
    ("lora", "open rows", "from layer 1 on", WITHOUT_GATE),
    ("lora", "open gains", WITHOUT_GATE),
    ("adapt", "norm: base", "widened"),
    ("lora", "widened"),
    ("adapt", "norm: base", "OLMo 2"),
    ("adapt", "norm: base", "Gemma 2"),
    ("adapt", "norm: base", "GPT-NeoX"),
    ("adapt", "norm: base", "mixture"),
    ("adapt", "norm: base", "GLM-4-MoE"),
    ("lora", "mixture"),
    ("adapt", "transformers"),
    ("lora", "transformers"),
)
"""The models of the table of exports."""


ANY = "…"
_NAMES = "|".join(sorted({FEATURES[name].settings["method"]["name"] for name in METHODS}))
_VARYING = (
    (r" \(model_type \w+\)", ""),
    (rf"(?<!take )\b(method(?:\.name)?|found) (?:{_NAMES})\b", rf"\1 {ANY}"),
    (r"\blayers\.\d+\.", f"layers.{ANY}."),
    (r"\b(a matrix|a base) in (?:fp8|nf4)\b", rf"\1 in {ANY}"),
)
"""What differs between reasons that are one for a reader: patterns, and what is shown instead."""


class Reasons:
    """The reasons why something is refused, numbered in the order in which they are found."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cell(self, reason: str | None) -> str:
        """What a table's cell says: that two things go together, or the number of the reason."""
        if reason is None:
            return WORKS
        for pattern, shown in _VARYING:
            reason = re.sub(pattern, shown, reason)
        return str(self._numbers.setdefault(reason, len(self._numbers) + 1))

    def lines(self) -> Iterator[str]:
        """A line for each."""
        for reason, number in self._numbers.items():
            yield f"| {number} | {reason.replace('|', chr(92) + '|')} |"


def tables() -> Iterator[str]:
    """The lines of all tables, each as soon as it is known."""
    reasons = Reasons()
    settings = [(name,) for name in SETTINGS]
    yield from _matrix("A method with a setting", "method", settings, METHODS, reasons)
    yield from _refused_pairs(reasons)
    yield from _matrix("A base", "base", ROWS_OF_BASES, BASES, reasons)
    yield from _exports(reasons)
    yield from ("", "## Reasons", "")
    yield from table_head("number", ["what the check says"])
    yield from reasons.lines()


def _matrix(
    title: str,
    kind: str,
    rows: Iterable[tuple[str, ...]],
    columns: Iterable[str],
    reasons: Reasons,
) -> Iterator[str]:
    """A table of the rows with a refusal, and a line that names the others; `kind` is what the
    columns are."""
    yield from ("", f"## {title}", "")
    names = list(columns)
    yield from table_head("", names)
    working: list[str] = []
    for row in rows:
        cells: list[str] = []
        for column in names:
            cells.append(reasons.cell(refusal([*row, column])))
        if set(cells) == {WORKS}:
            working.append(", ".join(row))
        else:
            yield table_row(row, cells)
    if working:
        yield from ("", f"Every {kind} works with {', '.join(working)}.")


def _refused_pairs(reasons: Reasons) -> Iterator[str]:
    yield from ("", "## Two settings", "")
    yield from ("With Adapt, all pairs of these settings go together but the following.", "")
    yield from table_head("", ["with", "reason"])
    for one, other in itertools.combinations(SETTINGS, 2):
        if contradicts(one, other) is None:
            reason = refusal([one, other])
            if reason is not None:
                yield table_row([one], [other, reasons.cell(reason)])


def _exports(reasons: Reasons) -> Iterator[str]:
    yield from ("", "## Exports", "")
    formats: list[str] = []
    for row in TRAINED:
        found = format_refusals(row)
        if not formats:
            formats = list(found)
            yield from table_head("", formats)
        yield table_row(row, [reasons.cell(found[name]) for name in formats])
