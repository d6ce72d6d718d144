"""The tables of a report: what each method learned and forgot, what it cost, and what the models wrote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.run_folder.metrics import mean, spread
from pipeline.studies.report.runs import PERPLEXITY, Group, corpora, figure_names, measure_of
from pipeline.studies.report.words import NOTHING, change, count, duration, of_figure, percent, short

_SHOWN_STEPS = 5


class Cell(NamedTuple):
    """A figure, a note after it in small type, and for costs its share of the column's largest value, for a bar."""

    text: str
    small: str = ""
    share: float | None = None


class Table(NamedTuple):
    """`header` has a name for each column, `above` names groups of columns, with their numbers of columns.

    A row is a label, the style of its mark or None, and its cells.
    """

    header: Sequence[str]
    rows: Sequence[tuple[str, int | None, Sequence[Cell]]]
    above: Sequence[tuple[str, int]] = ()


def results(groups: Sequence[Group], figures: Sequence[str] | None = None) -> Table:
    """Every figure, or `figures`, of every corpus at the end; the first row is the base's."""
    pairs = [(figure, corpus) for figure in figures or figure_names(groups) for corpus in corpora(groups)]
    columns = [pair for pair in pairs if any(_values(group, *pair) for group in groups)]
    base = []
    for figure, corpus in columns:
        values = {value for group in groups for value in _values(group, figure, corpus, before=True)}
        base.append(Cell(of_figure(figure)(values.pop()) if len(values) == 1 else NOTHING))
    rows = [(group.label, group.style, [_result(group, *pair) for pair in columns]) for group in groups]
    spans = Counter(figure.replace("_", " ") for figure, _ in columns)
    return Table([corpus for _, corpus in columns], [("base", None, base), *rows], list(spans.items()))


def _values(group: Group, figure: str, corpus: str, *, before: bool = False) -> list[float]:
    found = ((row.before if before else row.after).get(corpus, {}).get(figure) for row in group.rows)
    return [value for value in found if value is not None]


def _result(group: Group, figure: str, corpus: str) -> Cell:
    """The mean and spread over seeds, and for perplexities the change from the base."""
    after, before = _values(group, figure, corpus), _values(group, figure, corpus, before=True)
    if not after:
        return Cell(NOTHING)
    words, deviation = of_figure(figure), spread(after)
    note = "" if deviation is None else f"± {words(deviation)}"
    if figure == PERPLEXITY.figure and len(before) == len(after):
        rise = mean([PERPLEXITY.distance(now, then) for now, then in zip(after, before, strict=True)])
        note = f"{note} ({change(rise)})".strip() if math.isfinite(rise) else note
    return Cell(words(mean(after)), note)


def comparison(groups: Sequence[Group], others: Sequence[Group]) -> Table:
    """How far each method moved from its base, and the same method in `others`, which have their own corpora."""
    measure = measure_of([*groups, *others])
    of_method = {other.rows[0].method: other for other in reversed(others)}  # the first of each
    rows = []
    for group in groups:
        pair = [group, of_method.get(group.rows[0].method)]
        places = [own.standing(measure) if own else None for own in pair]
        learned = [Cell(measure.on_new(place.learned) if place else NOTHING) for place in places]
        forgotten = [Cell(measure.on_kept(place.forgotten) if place else NOTHING) for place in places]
        rows.append((group.label, group.style, [*learned, *forgotten]))
    above = [(f"learned: {measure.noun}", 2), (f"forgotten: {measure.noun}", 2)]
    return Table(["here", others[0].runs[0].source] * 2, rows, above)


def texts(groups: Sequence[Group]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """What each group's first run that has prompts wrote: (its label, a prompt, [(step, text)]), evenly chosen."""
    found = []
    for group in groups:
        written = next((run.written for run in group.runs if run.written), {})
        steps, last = sorted(written), len(written) - 1
        chosen = sorted({steps[round(last * at / (_SHOWN_STEPS - 1))] for at in range(_SHOWN_STEPS)}) if steps else []
        for prompt in written[steps[-1]] if steps else ():
            lines = [("base" if step == 0 else f"step {step:,}", written[step].get(prompt, NOTHING)) for step in chosen]
            found.append((group.label, prompt, lines))
    return found


def costs(groups: Sequence[Group]) -> Table:
    """Trained parameters, time, memory, inference, learning rate, steps and number of runs."""
    rows = []
    for group in groups:
        first = group.rows[0]
        trained, total = first.trainable_parameters, first.total_parameters
        cells = [
            _bar(groups, group, "trainable_parameters", count, percent(trained / total) if trained and total else ""),
            _bar(groups, group, "seconds", duration),
            _bar(groups, group, "peak_memory_gib", lambda value: f"{short(value)} GiB"),
            Cell(NOTHING if first.inference_cost is None else f"×{first.inference_cost:.2f}"),
            Cell(NOTHING if first.learning_rate is None else f"{first.learning_rate:g}"),
            Cell(f"{first.steps:,}", f"{count(first.tokens_seen)} tokens" if first.tokens_seen else ""),
            Cell(str(len(group.runs))),
        ]
        rows.append((group.label, group.style, cells))
    header = ["trained parameters", "time", "peak memory", "FLOPs of inference", "learning rate", "steps", "runs"]
    return Table(header, rows)


def _bar(groups: Sequence[Group], group: Group, name: str, words: Callable[[float], str], small: str = "") -> Cell:
    """The mean over a group's runs, with its share of the largest mean."""
    found = [[value for row in own.rows if (value := getattr(row, name)) is not None] for own in groups]
    means = [mean(values) if values else None for values in found]
    value, largest = means[groups.index(group)], max((other for other in means if other is not None), default=0.0)
    return Cell(NOTHING) if value is None else Cell(words(value), small, value / largest if largest > 0 else None)
