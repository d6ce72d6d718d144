"""The page of a study's runs, or of several single ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.extensions.report.formats import listed
from pipeline.extensions.report.html_page import (
    WIDE,
    FigureSection,
    Section,
    TableSection,
    html_page,
    write_figure,
)
from studies.report import tables
from studies.report.figures import plots_of
from studies.report.groups import Group, corpora, group, measure_of, on_frontier, parts
from studies.report.results import Row

_FOOTER = (
    "Made by python -m studies report. Perplexities are of held-out texts; “−50 %” is half of the "
    "base's, “×2” is twice."
)


def page(runs: Sequence[Row], title: str) -> str:
    """The report of `runs`, as HTML."""
    groups = group(runs)
    model_count = sum(len(own.rows) for own in groups)
    sources = ", ".join(dict.fromkeys(run.source for run in runs))
    source = f"{_counted(model_count, 'model')} of {_counted(len(groups), 'method')} · {sources}"
    return html_page(title, source, findings(groups), _sections(groups), _FOOTER)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _sections(groups: Sequence[Group]) -> list[Section]:
    """The figures and tables; the table of results comes behind the first figure."""
    shown = parts(groups)
    sections: list[Section] = [FigureSection(plot) for plot in plots_of(groups)]
    results = TableSection(
        "results",
        "Where each method ended",
        tables.results(groups, shown),
        "On the held-out texts: means over seeds ± one standard deviation; for perplexities also "
        "the change from the base.",
    )
    sections.insert(min(1, len(sections)), results)
    # Where corpora are shown together, a second table has each of them.
    single: dict[str, list[str]] = {}
    for name in corpora(groups):
        single[name] = [name]
    if shown != single:
        details = TableSection(
            "corpora",
            "Every single corpus",
            tables.results(groups, single),
            "The table above has their means, geometric ones of perplexities.",
        )
        sections.append(details)
    opened = tables.gate_texts(groups)
    if opened is not None:
        sections.append(
            TableSection(
                "gate",
                "On what the gate opens",
                opened,
                "Of text that was not used for fitting it. New text is to be open, all other kinds "
                "closed; the cost is in nats a token.",
            )
        )
    sections.append(
        TableSection(
            "costs", "Trained parameters and costs", tables.costs(groups), "Means over seeds."
        )
    )
    return sections


def write_figures(runs: Sequence[Row], folder: Path) -> list[Path]:
    """Writes every plot of the report as an SVG file; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for plot in plots_of(group(runs)):
        path = folder / f"{plot.name}.svg"
        write_figure(plot.draw(WIDE), path)
        paths.append(path)
    return paths


def findings(groups: Sequence[Group]) -> list[str]:
    """What the first figure shows, in sentences."""
    measure = measure_of(groups)
    placed = []
    for own in groups:
        place = own.standing(measure)
        if place is not None:
            placed.append((own.label, place))
    if len(placed) < 2:
        return []

    # Of equal ones `max` and `min` take the first, in the order of the study's file.
    most, at_most = max(placed, key=lambda pair: pair[1].learned)
    least, at_least = min(placed, key=lambda pair: pair[1].forgotten)
    best: list[str] = []
    for label, place in placed:
        if on_frontier(place, placed):
            best.append(label)
    sentences = [f"{most} learned most: {measure.noun} {measure.describe(at_most)}."]
    if least != most:
        sentences.append(f"{least} forgot least: {measure.noun} {measure.describe(at_least)}.")
    sentences.append(
        f"On the frontier, where no other both learned more and forgot less: {listed(best)}."
    )
    return sentences
