"""The tables of a report: what each method learned and forgot, and what it cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from pipeline.run_folder.metrics import mean, spread
from studies.report.formats import NOTHING, change, count, number, of_figure, percent
from studies.report.groups import PERPLEXITY, Group, value_of


class Cell(NamedTuple):
    """A figure, and a note after it in small type."""

    text: str
    small: str = ""


class Table(NamedTuple):
    """`header` has a name for each column, `above` names groups of columns, with their numbers of columns.

    A row is a label, the style of its mark or None, and its cells.
    """

    header: Sequence[str]
    rows: Sequence[tuple[str, int | None, Sequence[Cell]]]
    above: Sequence[tuple[str, int]] = ()


def results(groups: Sequence[Group], shown: Mapping[str, Sequence[str]]) -> Table:
    """Every figure of every part at the end; the first row is the base's."""
    known = (
        name for own in groups for row in own.rows for found in row.after.values() for name in found
    )
    pairs = [(figure, part) for figure in dict.fromkeys(known) for part in shown]
    columns = [
        (figure, part)
        for figure, part in pairs
        if any(_values(own, figure, shown[part]) for own in groups)
    ]
    base = []
    for figure, part in columns:
        values = {
            value for own in groups for value in _values(own, figure, shown[part], before=True)
        }
        base.append(Cell(of_figure(figure)(values.pop()) if len(values) == 1 else NOTHING))
    rows = [
        (own.label, own.style, [_result(own, figure, shown[part]) for figure, part in columns])
        for own in groups
    ]
    spans = Counter(figure.replace("_", " ") for figure, _ in columns)
    return Table([part for _, part in columns], [("base", None, base), *rows], list(spans.items()))


def _values(group: Group, figure: str, part: Sequence[str], *, before: bool = False) -> list[float]:
    found = (value_of(row.before if before else row.after, part, figure) for row in group.rows)
    return [value for value in found if value is not None]


def _result(group: Group, figure: str, part: Sequence[str]) -> Cell:
    """The mean and spread over seeds, and for perplexities the change from the base."""
    after, before = _values(group, figure, part), _values(group, figure, part, before=True)
    if not after:
        return Cell(NOTHING)
    words, deviation = of_figure(figure), spread(after)
    note = "" if deviation is None else f"± {words(deviation)}"
    if figure == PERPLEXITY.figure and len(before) == len(after):
        rise = mean(
            [PERPLEXITY.distance(now, then) for now, then in zip(after, before, strict=True)]
        )
        note = f"{note} ({change(rise)})".strip() if math.isfinite(rise) else note
    return Cell(words(mean(after)), note)


def costs(groups: Sequence[Group]) -> Table:
    """Trained parameters, time, memory, inference, learning rate, steps and number of runs."""
    rows = [(own.label, own.style, _costs(own)) for own in groups]
    header = [
        "trained parameters",
        "time",
        "peak memory",
        "FLOPs of inference",
        "learning rate",
        "steps",
        "runs",
    ]
    return Table(header, rows)


def _costs(group: Group) -> list[Cell]:
    first = group.rows[0]
    trained, total = first.trainable_parameters, first.total_parameters
    seconds = [row.seconds for row in group.rows if row.seconds is not None]
    memory = [row.peak_memory_gib for row in group.rows if row.peak_memory_gib is not None]
    return [
        Cell(
            NOTHING if trained is None else count(trained),
            percent(trained / total) if trained and total else "",
        ),
        Cell(str(timedelta(seconds=round(mean(seconds)))) if seconds else NOTHING),
        Cell(f"{number(mean(memory))} GiB" if memory else NOTHING),
        Cell(NOTHING if first.inference_cost is None else f"×{first.inference_cost:.2f}"),
        Cell(NOTHING if first.learning_rate is None else f"{first.learning_rate:g}"),
        Cell(f"{first.steps:,}", f"{count(first.tokens_seen)} tokens" if first.tokens_seen else ""),
        Cell(str(len(group.rows))),
    ]
