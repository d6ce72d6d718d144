"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.evaluation.perplexity import Score


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *figures = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first, *(figure.strip().rjust(len(figure)) for figure in figures)]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def readable(perplexity: float) -> str:
    """Four digits, or a power of ten where a model knows nothing of a text."""
    return f"{perplexity:.2f}" if perplexity < 1e5 else f"{perplexity:.1e}"


def score_table(scores: Mapping[str, Score]) -> str:
    """One row a corpus."""
    rows = [
        [name, f"{one.documents:,}", f"{one.tokens:,}", readable(one.perplexity), f"{one.bits_per_byte:.4f}"]
        for name, one in scores.items()
    ]
    return table(["", "documents", "tokens", "perplexity", "bits per byte"], rows)
