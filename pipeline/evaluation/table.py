"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.evaluation.perplexity import Score
from pipeline.run_folder.metrics import mean, spread


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *figures = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join(
            [first, *(figure.strip().rjust(len(figure)) for figure in figures)]
        ).rstrip()

    return "\n".join(
        [line(header), "  ".join("-" * width for width in widths).rstrip(), *map(line, rows)]
    )


def readable(perplexity: float) -> str:
    """A perplexity with two decimals, or in scientific notation if it is very large."""
    return f"{perplexity:.2f}" if perplexity < 1e5 else f"{perplexity:.1e}"


def cell(value: float | None, form: str) -> str:
    """A value in the given format; empty if there is none."""
    return "" if value is None else format(value, form)


def over_seeds(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The mean, followed by the sample standard deviation if there are several values."""
    deviation = spread(values)
    return form(mean(values)) + ("" if deviation is None else f" ±{form(deviation)}")


def score_table(scores: Mapping[str, Mapping[str, Score]]) -> str:
    """One row per model and corpus. `scores` is by the model's name, then the corpus's."""
    rows, cut = [], set()
    for model, corpora in scores.items():
        for corpus, score in corpora.items():
            name = corpus if len(scores) == 1 else f"{model}: {corpus}"
            sizes = [f"{score.documents:,}", f"{score.tokens:,}"]
            rows.append([name, *sizes, readable(score.perplexity), f"{score.bits_per_byte:.4f}"])
            cut |= set() if score.whole else {corpus}
    note = f"Scored is a part of {', '.join(sorted(cut))}; all of it: --max-bytes 0." if cut else ""
    return "\n".join(
        [table(["", "documents", "tokens", "perplexity", "bits per byte"], rows), note]
    )
