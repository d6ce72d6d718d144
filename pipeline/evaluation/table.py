"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.run_folder.metrics import mean, readable, spread

if TYPE_CHECKING:
    # Its module loads torch, and commands that print a table may need none.
    from pipeline.evaluation.perplexity import Score


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first on the left, the others on the right."""
    widths: list[int] = []
    for column in zip(header, *rows, strict=True):
        longest = max(column, key=len)
        widths.append(len(longest))
    lines = [_aligned(header, widths)]
    lines.append("  ".join("-" * width for width in widths).rstrip())
    for row in rows:
        lines.append(_aligned(row, widths))
    return "\n".join(lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One line of a table."""
    padded = [cells[0].ljust(widths[0])]
    for text, width in zip(cells[1:], widths[1:], strict=True):
        padded.append(text.rjust(width))
    return "  ".join(padded).rstrip()


def cell(value: float | None, form: str) -> str:
    """A value in the given format; empty if there is none."""
    return "" if value is None else format(value, form)


def over_seeds(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The mean, followed by the sample standard deviation if there are several values."""
    deviation = spread(values)
    if deviation is None:
        return form(mean(values))
    return f"{form(mean(values))} ±{form(deviation)}"


def score_table(
    scores: Mapping[str, Mapping[str, Score]],
    further: Mapping[str, Mapping[tuple[str, str], str]] | None = None,
) -> str:
    """A table with a row for each model and corpus.

    Args:
        scores: by the name of the model, then of the corpus.
        further: the cells of further columns, by header, then by model and corpus.
    """
    columns = further or {}
    rows: list[list[str]] = []
    cut: set[str] = set()
    for model, corpora in scores.items():
        for corpus, score in corpora.items():
            name = corpus if len(scores) == 1 else f"{model}: {corpus}"
            row = [
                name,
                f"{score.documents:,}",
                f"{score.tokens:,}",
                readable(score.perplexity),
                f"{score.bits_per_byte:.4f}",
            ]
            row += [cells.get((model, corpus), "") for cells in columns.values()]
            rows.append(row)
            if not score.whole:
                cut.add(corpus)
    note = ""
    if cut:
        names = ", ".join(sorted(cut))
        note = f"Only a part of {names} was scored; --max-bytes 0 scores all of it."
    header = ["", "documents", "tokens", "perplexity", "bits per byte", *columns]
    return f"{table(header, rows)}\n{note}"
