"""Many corpora of one role, such as the questions about each attribute of a person, as one that stands for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from pipeline.report.rows import Run
from pipeline.run_folder.averages import geometric_mean, mean
from pipeline.run_folder.looks import Figures, Look
from pipeline.run_folder.study_summary import Row

_MOST = 3  # corpora of a role that a picture can show


def condensed(run: Run) -> Run:
    """The run with the corpora of a role as one where they are more than three: by means, of perplexities geometric."""
    named = {role: [name for name, own in run.row.roles.items() if own == role] for role in run.row.roles.values()}
    many = {role: names for role, names in named.items() if len(names) > _MOST}
    if not many:
        return run
    shared = [_shared_name(names) for names in many.values()]
    alone = [name for names in named.values() if len(names) <= _MOST for name in names]
    parts = {
        whole if [*shared, *alone].count(whole) == 1 else f"{whole} ({role})": names
        for whole, (role, names) in zip(shared, many.items(), strict=True)
    }
    return replace(run, row=_merged(run.row, parts), tried=[_merged(row, parts) for row in run.tried])


def _merged(row: Row, parts: Mapping[str, Sequence[str]]) -> Row:
    gone = {name for names in parts.values() for name in names}
    roles = {whole: row.roles[names[0]] for whole, names in parts.items()}

    def merged(figures: Figures) -> Figures:
        means = {whole: _means([figures[name] for name in names if name in figures]) for whole, names in parts.items()}
        return {**means, **{name: own for name, own in figures.items() if name not in gone}}

    changed = {
        "roles": {**roles, **{name: role for name, role in row.roles.items() if name not in gone}},
        "before": merged(row.before),
        "during": [Look(step=look.step, figures=merged(look.figures)) for look in row.during],
        "after": merged(row.after),
    }
    return row.model_copy(update=changed)


def _means(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in figures:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {name: geometric_mean(of) if name == "perplexity" else mean(of) for name, of in values.items()}


def _shared_name(names: Sequence[str]) -> str:
    """What the names begin with, or how many they are."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike).rstrip("_-. /") or f"{len(names)} corpora"
