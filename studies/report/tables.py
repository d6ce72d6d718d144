"""The tables of a report: what each method learned and forgot, and what it cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from pipeline.extensions.report.formats import (
    NOTHING,
    change,
    count,
    figure_format,
    number,
    percent,
)
from pipeline.extensions.report.tables import Cell, Table, TableRow
from pipeline.gating.folder import KindFigures
from pipeline.run_folder.metrics import mean, spread
from studies.report.groups import PERPLEXITY, Group, value_of
from studies.report.results import Row


def results(groups: Sequence[Group], shown: Mapping[str, Sequence[str]]) -> Table:
    """Every figure of every part at the end; the first row is the base's.

    `shown` has the corpora of each part by its name.
    """
    columns: list[tuple[str, str]] = []
    for figure in _figures(groups):
        for part, names in shown.items():
            if any(_ends(own, figure, names) for own in groups):
                columns.append((figure, part))

    base: list[Cell] = []
    for figure, part in columns:
        values: set[float] = set()
        for own in groups:
            values.update(_starts(own, figure, shown[part]))
        # The runs of several studies may have measured their bases differently: then there is no
        # one figure of the base.
        base.append(Cell(figure_format(figure)(values.pop()) if len(values) == 1 else NOTHING))

    rows = [TableRow("base", base, is_reference=True)]
    for own in groups:
        cells = [_result(own, figure, shown[part]) for figure, part in columns]
        rows.append(TableRow(own.label, cells, own.style))
    header: list[str] = []
    spans: Counter[str] = Counter()
    for figure, part in columns:
        header.append(part)
        spans[figure.replace("_", " ")] += 1
    return Table(header, rows, list(spans.items()))


def _figures(groups: Sequence[Group]) -> list[str]:
    """The names of all figures that a run has at its end, each once, in the order of the runs."""
    names: list[str] = []
    for own in groups:
        for row in own.rows:
            for figures in row.after.values():
                for name in figures:
                    if name not in names:
                        names.append(name)
    return names


def _starts(group: Group, figure: str, part: Sequence[str]) -> list[float]:
    """The figure of each run's base."""
    return _known(value_of(row.before, part, figure) for row in group.rows)


def _ends(group: Group, figure: str, part: Sequence[str]) -> list[float]:
    """The figure of each run at its end."""
    return _known(value_of(row.after, part, figure) for row in group.rows)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _result(group: Group, figure: str, part: Sequence[str]) -> Cell:
    """The mean and spread over seeds, and for perplexities the change from the base."""
    after = _ends(group, figure, part)
    if not after:
        return Cell(NOTHING)
    in_words = figure_format(figure)
    notes: list[str] = []
    deviation = spread(after)
    if deviation is not None:
        notes.append(f"± {in_words(deviation)}")

    before = _starts(group, figure, part)
    # Each run against its own base, which several studies may have measured differently.
    if figure == PERPLEXITY.figure and len(before) == len(after):
        rises: list[float] = []
        for now, then in zip(after, before, strict=True):
            rises.append(PERPLEXITY.distance(now, then))
        # In nats: a mean of percentages would be that of the largest.
        rise = mean(rises)
        if math.isfinite(rise):
            notes.append(f"({change(rise)})")
    return Cell(in_words(mean(after)), " ".join(notes))


def costs(groups: Sequence[Group]) -> Table:
    """Trained parameters, time, memory, inference, learning rate, steps and number of runs."""
    header = [
        "trained parameters",
        "time",
        "peak memory",
        "FLOPs of inference",
        "learning rate",
        "steps",
        "runs",
    ]
    rows: list[TableRow] = []
    for own in groups:
        rows.append(TableRow(own.label, _costs(own), own.style))
    return Table(header, rows)


def _costs(group: Group) -> list[Cell]:
    # Runs that differ in seed alone have all but time and memory in common.
    first = group.rows[0]
    steps = Cell(f"{first.steps:,}")
    if first.tokens_seen:
        steps = Cell(steps.text, f"{count(first.tokens_seen)} tokens")
    inference = Cell(NOTHING)
    if first.inference_cost is not None:
        inference = Cell(f"×{first.inference_cost:.2f}")
    learning_rate = Cell(NOTHING)
    if first.learning_rate is not None:
        learning_rate = Cell(f"{first.learning_rate:g}")
    return [
        _trained_parameters(first),
        _time(_known(row.seconds for row in group.rows)),
        _memory(_known(row.peak_memory_gib for row in group.rows)),
        inference,
        learning_rate,
        steps,
        Cell(str(len(group.rows))),
    ]


def _trained_parameters(row: Row) -> Cell:
    trained = row.trainable_parameters
    if trained is None:
        return Cell(NOTHING)
    if trained and row.total_parameters:
        return Cell(count(trained), percent(trained / row.total_parameters))
    return Cell(count(trained))


def _time(seconds: Sequence[float]) -> Cell:
    if not seconds:
        return Cell(NOTHING)
    return Cell(str(timedelta(seconds=round(mean(seconds)))))


def _memory(gib: Sequence[float]) -> Cell:
    if not gib:
        return Cell(NOTHING)
    return Cell(f"{number(mean(gib))} GiB")


def gate_texts(groups: Sequence[Group]) -> Table | None:
    """On how much of each kind of text a gate opens, and what that costs; None without a gate.

    Kinds on which a gate never opens are one row.
    """
    rows: list[TableRow] = []
    for own in groups:
        for row in own.rows:
            closed: list[KindFigures] = []
            for name, figures in row.gate_texts.items():
                if figures.open_tokens or figures.left_out or figures.is_new:
                    label = f"{name} (left out)" if figures.left_out else name
                    rows.append(TableRow(f"{own.label}: {label}", _kind_cells(figures), own.style))
                else:
                    closed.append(figures)
            if closed:
                tokens = sum(figures.tokens for figures in closed)
                cells = [Cell(count(tokens)), Cell("0"), Cell("0")]
                others = f"{own.label}: {len(closed)} other kinds"
                rows.append(TableRow(others, cells, own.style))
    if not rows:
        return None
    return Table(["tokens", "open", "nats a token"], rows)


def _kind_cells(figures: KindFigures) -> Sequence[Cell]:
    cost = NOTHING if figures.cost is None else number(figures.cost, 4)
    share = f"{100 * figures.open_fraction:.2f} %"
    return [Cell(count(figures.tokens)), Cell(share), Cell(cost)]
