"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from pipeline.evaluation.perplexity import Score
from pipeline.run_folder.metrics import mean, spread


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *figures = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first, *(figure.strip().rjust(len(figure)) for figure in figures)]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths).rstrip(), *map(line, rows)])


def readable(perplexity: float) -> str:
    """Four digits, or a power of ten where a model knows nothing of a text."""
    return f"{perplexity:.2f}" if perplexity < 1e5 else f"{perplexity:.1e}"


def cell(value: float | None, form: str) -> str:
    """A figure in a format's words; nothing where there is none."""
    return "" if value is None else format(value, form)


def over_seeds(values: Sequence[float], words: Callable[[float], str]) -> str:
    """The mean, and behind it one standard deviation (of a sample) where there are several."""
    around = spread(values)
    return words(mean(values)) + ("" if around is None else f" ±{words(around)}")


def score_table(scores: Mapping[str, Mapping[str, Score]]) -> str:
    """One row a corpus and model, by both their names; of a single model the corpora's say enough."""
    rows = []
    for model, corpora in scores.items():
        for corpus, one in corpora.items():
            name = corpus if len(scores) == 1 else f"{model}: {corpus}"
            sizes = [f"{one.documents:,}", f"{one.tokens:,}"]
            rows.append([name, *sizes, readable(one.perplexity), f"{one.bits_per_byte:.4f}"])
    return table(["", "documents", "tokens", "perplexity", "bits per byte"], rows)


def as_json(values: Mapping[str, Any]) -> str:
    """The same figures for a program, dataclasses included."""
    return orjson.dumps(values, option=orjson.OPT_INDENT_2).decode()
