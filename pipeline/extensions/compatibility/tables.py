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
    ("adapt", "norm: base", "open rows", WITHOUT_GATE),
    ("adapt", "norm: base", "open gains", WITHOUT_GATE),
    ("adapt", "norm: base", "open gains", WITHOUT_GATE, "Qwen3"),
    ("adapt", "norm: base", "low rank", WITHOUT_GATE),
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
_SHOWN = (
    (r"^[\w.]+: (unknown key)$", "the method has no such setting"),
    (r";[^;]*$", ""),  # the remedy, which `--why` shows
    (r": llama, mistral, .*$", ""),
    (rf"(?<!take )\b(method(?:\.name)?) (?:{_NAMES})\b", rf"\1 {ANY}"),
    (r", found (?!a hosted)[\w-]+", ""),
    (r" \(model_type \w+\)", ""),
    (r" \(layers\.\d+\.[\w.]+\)", ""),
    (r"\blayers\.\d+\.", f"layers.{ANY}."),
    (r"\b(a matrix|a base) in (?:fp8|nf4)\b", rf"\1 in {ANY}"),
    (r"before layer \d+\b", "before a layer above 0"),
)
"""How a page shows what a check says, so that reasons that are one for a reader are one: patterns,
and what is shown instead."""


def shown(reason: str) -> str:
    """A reason as a cell of a table shows it."""
    for pattern, instead in _SHOWN:
        reason = re.sub(pattern, instead, reason)
    return reason.replace("|", r"\|")


def tables() -> Iterator[str]:
    """The lines of all tables, each table as soon as it is known."""
    settings = [(name,) for name in SETTINGS]
    yield from _refused("A method with a setting", "method", settings, METHODS)
    yield from _refused_pairs()
    yield from _refused("A base", "base", ROWS_OF_BASES, BASES)
    yield from _exports()


def _refused(
    title: str, kind: str, rows: Iterable[tuple[str, ...]], columns: Iterable[str]
) -> Iterator[str]:
    """What is refused of each row with each column, and a line that names the rows without a
    refusal; `kind` is what the columns are."""
    yield from ("", f"## {title}", "")
    names = list(columns)
    working: list[str] = []
    pairs: list[tuple[str, str, str]] = []
    for row in rows:
        name = " and ".join(row)
        reasons = {column: refusal([*row, column]) for column in names}
        found = [(name, column, reason) for column, reason in reasons.items() if reason]
        pairs += found
        if not found:
            working.append(name)
    yield from _table_of(f"not with the {kind}", pairs)
    if working:
        yield from ("", f"Every {kind} works with {', '.join(working)}.")


def _refused_pairs() -> Iterator[str]:
    yield from ("", "## Two settings", "")
    yield from ("With Adapt, all pairs of these settings go together but the following.", "")
    pairs: list[tuple[str, str, str]] = []
    for one, other in itertools.combinations(SETTINGS, 2):
        if contradicts(one, other) is None:
            reason = refusal([one, other])
            if reason is not None:
                pairs.append((one, other, reason))
    yield from _table_of("not with", pairs)


def _table_of(second: str, pairs: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """A row for each reason and what it refuses: features that share both stand in one."""
    refused: dict[tuple[str, str], list[str]] = {}
    for one, other, reason in pairs:
        refused.setdefault((one, shown(reason)), []).append(other)
    rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (one, reason), others in refused.items():
        rows.setdefault((tuple(others), reason), []).append(one)
    yield from table_head("feature", [second, "because"])
    for (columns, reason), ones in rows.items():
        yield table_row(ones, [", ".join(columns), reason])


def _exports() -> Iterator[str]:
    """By the formats that can hold it, and by why an ordinary or packed model cannot, what is
    trained."""
    yield from ("", "## Exports", "")
    rows: dict[tuple[str, str], list[str]] = {}
    for trained in TRAINED:
        found = format_refusals(trained)
        formats = [name for name, reason in found.items() if reason is None]
        wanted = "difference" if {"fft", "gate"} <= set(trained) else "merged"
        reason = found[wanted]
        cells = ", ".join(formats) or "nothing", f"{wanted}: {shown(reason)}" if reason else ""
        rows.setdefault(cells, []).append(", ".join(trained))
    yield from table_head("trained", ["exports as", "refused"])
    for cells, models in rows.items():
        yield table_row(["; ".join(models)], cells)
