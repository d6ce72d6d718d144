"""The tables of a report: what each method learned and forgot, what was trained, and what it cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run_folder.metrics import mean
from pipeline.run_folder.status import RunStatus
from pipeline.studies.report.axes import NOTHING, change, count, duration, of_figure, percent, plus_minus, short
from pipeline.studies.report.runs import PERPLEXITY, Group, corpora, figure_names, measure_of

_SHOWN_STEPS = 5


@dataclass(frozen=True)
class Cell:
    """A figure, a note after it in small type, and for costs its share of the column's largest value, for a bar."""

    text: str
    small: str = ""
    share: float | None = None


TableRow = tuple[str, int | None, Sequence[Cell]]
"""(label, style of its mark or None, cells)"""


@dataclass(frozen=True)
class Table:
    """`header` has a name for each column, `above` names groups of columns, with their numbers of columns."""

    header: Sequence[str]
    rows: Sequence[TableRow]
    above: Sequence[tuple[str, int]] = ()


def results(groups: Sequence[Group]) -> Table:
    """Every figure of every corpus at the end; the first row is the base's."""
    return _ends(groups, figure_names(groups))


def each_corpus(groups: Sequence[Group]) -> Table:
    """The figure that the runs are compared by, for every single corpus."""
    return _ends(groups, [measure_of(row for group in groups for row in group.rows).figure])


def comparison(groups: Sequence[Group], others: Sequence[Group]) -> Table:
    """How far each method moved from its base, and the same method in `others`, which have their own corpora."""
    measure = measure_of(row for group in [*groups, *others] for row in group.rows)
    of_method = {group.rows[0].method: group for group in others}
    rows: list[TableRow] = []
    for group in groups:
        other = of_method.get(group.rows[0].method)
        places = [group.standing(measure), other and other.standing(measure)]
        learned = [Cell(measure.on_new(place.learned) if place else NOTHING) for place in places]
        forgotten = [Cell(measure.on_kept(place.forgotten) if place else NOTHING) for place in places]
        rows.append((group.label, group.style, [*learned, *forgotten]))
    name = others[0].runs[0].source
    above = [(f"learned: {measure.noun}", 2), (f"forgotten: {measure.noun}", 2)]
    return Table(["here", name] * 2, rows, above)


def differences(groups: Sequence[Group], earlier: Sequence[Group]) -> Table:
    """Each figure of each corpus at the end of earlier runs, and how it changed in those of `groups`."""
    shown = [*earlier, *groups]
    pairs = [(figure, corpus) for figure in figure_names(shown) for corpus in corpora(shown)]
    rows: list[TableRow] = []
    for figure, corpus in pairs:
        then, *others = ([*_figures(group, figure, corpus)] for group in [earlier[0], *groups])
        if not then or not any(others):
            continue
        cells = [Cell(of_figure(figure)(mean(then)))]
        for now in others:
            cells.append(Cell(of_figure(figure)(mean(now)), _changed(mean(now), mean(then))) if now else Cell(NOTHING))
        rows.append((f"{figure.replace('_', ' ')}, {corpus}", None, cells))
    return Table([earlier[0].label, *(group.label for group in groups)], rows)


def _changed(now: float, then: float) -> str:
    return percent(now / then - 1, signed=True) if then and math.isfinite(now) and math.isfinite(then) else ""


def texts(groups: Sequence[Group]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """What each group's first run that has prompts wrote: (its label, a prompt, [(step, text)]), evenly chosen."""
    found = []
    for group in groups:
        written = next((run.written for run in group.runs if run.written), {})
        steps = sorted(written)
        last = len(steps) - 1
        chosen = sorted({steps[round(last * at / (_SHOWN_STEPS - 1))] for at in range(_SHOWN_STEPS)}) if steps else []
        for prompt in written[steps[-1]] if steps else ():
            lines = [("base" if step == 0 else f"step {step:,}", written[step].get(prompt, NOTHING)) for step in chosen]
            found.append((group.label, prompt, lines))
    return found


def progress(statuses: Sequence[RunStatus]) -> Table:
    """How far runs are that are not finished, and when they end."""
    rows: list[TableRow] = []
    for status in statuses:
        cells = [
            Cell(status.state),
            Cell(f"{status.step:,}", f"of {status.steps:,}" if status.steps else "", status.step / (status.steps or 1)),
            Cell(NOTHING if status.loss is None else short(status.loss)),
            Cell(NOTHING if status.tokens_per_second is None else f"{count(status.tokens_per_second)} tokens/s"),
            Cell(NOTHING if status.seconds_left is None else duration(status.seconds_left)),
        ]
        rows.append((Path(status.folder).name, None, cells))
    return Table(["state", "step", "loss", "speed", "time left"], rows)


def _ends(groups: Sequence[Group], figures: Sequence[str]) -> Table:
    pairs = [(figure, corpus) for figure in figures for corpus in corpora(groups)]
    columns = [pair for pair in pairs if any(_figures(group, *pair) for group in groups)]
    spans = Counter(figure for figure, _ in columns)
    base = [Cell(plus_minus(_of_base(groups, *pair), of_figure(pair[0]))[0]) for pair in columns]
    rows: list[TableRow] = [("base", None, base)]
    rows += [(group.label, group.style, [_result(group, *pair) for pair in columns]) for group in groups]
    above = [(figure.replace("_", " "), span) for figure, span in spans.items()]
    return Table([corpus for _, corpus in columns], rows, above)


def costs(groups: Sequence[Group]) -> Table:
    """Trained parameters, time, memory, learning rate, steps and number of runs."""
    trained, seconds, memory = (_means(groups, name) for name in ("trainable_parameters", "seconds", "peak_memory_gib"))
    rows: list[TableRow] = []
    for group, parameters, time_s, memory_gib in zip(groups, trained, seconds, memory, strict=True):
        first = group.rows[0]
        share = percent(parameters / first.total_parameters) if parameters and first.total_parameters else ""
        rate = f"{first.learning_rate:g}" if first.learning_rate is not None else NOTHING
        tokens = f"{count(first.tokens_seen)} tokens" if first.tokens_seen else ""
        cells = [
            _bar(parameters, trained, count, share),
            _bar(time_s, seconds, duration),
            _bar(memory_gib, memory, lambda value: f"{short(value)} GiB"),
            Cell(rate),
            Cell(f"{first.steps:,}", tokens),
            Cell(str(len(group.runs))),
        ]
        rows.append((group.label, group.style, cells))
    return Table(["trained parameters", "time", "peak memory", "learning rate", "steps", "runs"], rows)


def _figures(group: Group, figure: str, corpus: str, *, before: bool = False) -> list[float]:
    found = ((row.before if before else row.after).get(corpus, {}).get(figure) for row in group.rows)
    return [value for value in found if value is not None]


def _of_base(groups: Sequence[Group], figure: str, corpus: str) -> list[float]:
    """The base's value, if all runs have the same."""
    found = {value for group in groups for value in _figures(group, figure, corpus, before=True)}
    return list(found) if len(found) == 1 else []


def _result(group: Group, figure: str, corpus: str) -> Cell:
    """The mean and spread over seeds, and for perplexities the change from the base."""
    after = _figures(group, figure, corpus)
    text, around = plus_minus(after, of_figure(figure))
    before = _figures(group, figure, corpus, before=True)
    if figure != PERPLEXITY.figure or len(before) != len(after):
        return Cell(text, around)
    rises = mean([PERPLEXITY.distance(now, then) for now, then in zip(after, before, strict=True)])
    return Cell(text, f"{around} ({change(rises)})".strip() if math.isfinite(rises) else around)


def _means(groups: Sequence[Group], name: str) -> list[float | None]:
    found = [[value for row in group.rows if (value := getattr(row, name)) is not None] for group in groups]
    return [mean(values) if values else None for values in found]


def _bar(value: float | None, column: Sequence[float | None], words: Callable[[float], str], small: str = "") -> Cell:
    largest = max((other for other in column if other is not None), default=0.0)
    if value is None:
        return Cell(NOTHING)
    return Cell(words(value), small, value / largest if largest > 0 else None)
