"""The page of one run: what a reader wants to know first, then figures, tables and texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.method import title_of
from pipeline.extensions.report.figures.plots import Plot
from pipeline.extensions.report.formats import NOTHING, change, number
from pipeline.extensions.report.gate_tables import gate_sections, opened_kinds
from pipeline.extensions.report.html_page import (
    WIDE,
    FigureSection,
    Section,
    TextSection,
    WrittenText,
    html_page,
    write_figure,
)
from pipeline.extensions.report.recorded_run import RecordedRun
from pipeline.extensions.report.run_figures import plots_of_run
from pipeline.extensions.report.run_tables import cost_sections, score_sections, stage_sections
from pipeline.extensions.report.written_texts import Continued
from pipeline.run_folder.metrics import METRICS

_FOOTER = (
    "Made by scale-cpt report. Perplexities of curves are of packed held-out sequences; “−50 %” is "
    "half of the base's, “×2” is twice."
)
_NUMBERED = 6
"""So many damaged lines are numbered."""


def run_page(run: RecordedRun) -> str:
    """The page, as HTML."""
    return html_page(run.name, _source(run), _findings(run), _sections(run), _FOOTER)


def write_figures(run: RecordedRun, folder: Path) -> list[Path]:
    """Writes every plot of the page as an SVG file; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for plot in plots_of_run(run):
        path = folder / f"{plot.name}.svg"
        write_figure(plot.draw(WIDE), path)
        paths.append(path)
    return paths


def _sections(run: RecordedRun) -> list[Section]:
    figures = {plot.name: plot for plot in plots_of_run(run)}
    sections: list[Section] = []
    sections += score_sections(run)
    sections += _figure(figures, "perplexity")
    of_gate = gate_sections(run)
    sections += of_gate[:1]
    sections += _texts(run)
    sections += _figure(figures, "course")
    sections += stage_sections(run)
    sections += _figure(figures, "tasks")
    # Of hundreds of languages and scripts: what a reader looks for first comes before them.
    sections += of_gate[1:]
    sections += cost_sections(run)
    return sections


def _figure(figures: dict[str, Plot], name: str) -> list[FigureSection]:
    return [FigureSection(figures[name])] if name in figures else []


def _source(run: RecordedRun) -> str:
    """The state of the run, its method and base, and where it is."""
    status = run.status
    parts: list[str] = [status.state]
    if status.steps:
        parts.append(f"step {status.step:,} of {status.steps:,}")
    if status.stage is not None and status.state != "done":
        parts.append(f"stage {status.stage}")
    method = run.settings.get("method")
    if isinstance(method, dict):
        parts.append(title_of(str(method.get("variant") or method.get("name"))))
    if run.settings.get("base"):
        parts.append(f"base {run.settings['base']}")
    parts.append(str(run.folder))
    return " · ".join(parts)


def _findings(run: RecordedRun) -> list[str]:
    """What a reader must know before anything else."""
    sentences: list[str] = []
    if run.status.state == "failed":
        sentences.append(f"Failed: {run.status.why}.")
    if not run.metrics.curves and not run.metrics.validations:
        sentences.append(f"No step is recorded yet ({run.status.why}).")
    for corpus in run.metrics.corpora:
        sentence = _course_of(run, corpus)
        if sentence is not None:
            sentences.append(sentence)
    opened = opened_kinds(run)
    if opened is not None:
        sentences.append(opened)
    damaged = run.metrics.damaged
    if damaged:
        numbers = ", ".join(f"{line:,}" for line in damaged[:_NUMBERED])
        more = f" and {len(damaged) - _NUMBERED:,} more" if len(damaged) > _NUMBERED else ""
        sentences.append(f"Damaged lines of {METRICS} are left out: {numbers}{more}.")
    return sentences


def _course_of(run: RecordedRun, corpus: str) -> str | None:
    """From where to where the perplexity of a corpus went; None before the second validation."""
    points = run.metrics.perplexities(corpus)
    if len(points) < 2:
        return None
    (_, first), (step, last) = points[0], points[-1]
    sentence = (
        f"{corpus}: held-out perplexity {number(first)} at step {points[0][0]:,.0f}, "
        f"{number(last)} at step {step:,.0f} ({change(math.log(last) - math.log(first))})"
    )
    gate = run.gate.heldout.get(corpus) if run.gate is not None else None
    if gate is not None and gate.gated_perplexity:
        sentence += f", {number(gate.gated_perplexity)} with its gate"
    return f"{sentence}."


def _texts(run: RecordedRun) -> list[TextSection]:
    """What the model wrote: before the first step beside the last time, and between them."""
    written = [_written(prompt) for prompt in run.texts if prompt.texts]
    if not written:
        return []
    last = max(max(prompt.texts) for prompt in run.texts if prompt.texts)
    note = "The likeliest continuation of each prompt of validation.prompts."
    if run.has_gate:
        note += " Of the model without its gate, which is fitted after training."
    headings = ("before training", f"after step {last:,}")
    return [TextSection("texts", "What the model wrote", note, headings, written)]


def _written(prompt: Continued) -> WrittenText:
    steps: Sequence[int] = sorted(prompt.texts)
    before = prompt.texts.get(0, NOTHING)
    after = prompt.texts[steps[-1]] if steps[-1] > 0 else NOTHING
    between = [(f"step {step:,}", prompt.texts[step]) for step in steps[:-1] if step > 0]
    return WrittenText(prompt.prompt, before or NOTHING, after or NOTHING, between)
