"""The tables of a run beside those of its gate: scores, stages, and costs."""

from __future__ import annotations

import math

from pipeline.extensions.report.formats import (
    NOTHING,
    change,
    count,
    duration,
    number,
    percent,
    stored,
)
from pipeline.extensions.report.html_page import TableSection
from pipeline.extensions.report.recorded_run import RecordedRun, ScoredText, Scores
from pipeline.extensions.report.tables import Cell, Table, TableRow


def score_sections(run: RecordedRun) -> list[TableSection]:
    """The scores of base and export, which `scale-cpt evaluate` measured; none before it."""
    if run.scores is None:
        return []
    sections: list[TableSection] = []
    if run.scores.scores.get("after"):
        note = "Whole held-out documents, by scale-cpt evaluate."
        if run.settings.get("vocabulary"):
            note += " Base and export have two tokenizers: only bits per byte can be compared."
        is_cut = any(not text.whole for text in run.scores.scores["after"].values())
        sections.append(
            TableSection(
                "scores",
                "Scores of the base and of the export",
                _scores(run, run.scores),
                note,
                after="Only a part of the text was scored." if is_cut else "",
            )
        )
    if run.scores.chats.get("after"):
        sections.append(TableSection("chats", "Greedy answers to chats", _chats(run.scores), ""))
    return sections


def _scores(run: RecordedRun, scores: Scores) -> Table:
    header = ["documents", "base", "export", "base", "export"]
    rows: list[TableRow] = []
    for corpus, after in scores.scores["after"].items():
        before = scores.scores.get("before", {}).get(corpus)
        cells = [Cell(f"{after.documents:,}")]
        cells += [_perplexity(before), _changed_perplexity(run, before, after)]
        cells += [_bits(before), _bits(after)]
        rows.append(TableRow(corpus, cells))
    return Table(header, rows, [("", 1), ("perplexity", 2), ("bits per byte", 2)])


def _perplexity(score: ScoredText | None) -> Cell:
    if score is None:
        return Cell(NOTHING)
    return Cell(number(math.inf if score.perplexity is None else score.perplexity))


def _changed_perplexity(run: RecordedRun, before: ScoredText | None, after: ScoredText) -> Cell:
    cell = _perplexity(after)
    # Perplexities of two tokenizers do not compare.
    if before is None or run.settings.get("vocabulary"):
        return cell
    if not before.perplexity or not after.perplexity:
        return cell
    return Cell(cell.text, change(math.log(after.perplexity / before.perplexity)))


def _bits(score: ScoredText | None) -> Cell:
    if score is None:
        return Cell(NOTHING)
    return Cell(number(math.inf if score.bits_per_byte is None else score.bits_per_byte, 4))


def _chats(scores: Scores) -> Table:
    header = ["chats"]
    rows: list[TableRow] = []
    for file, after in scores.chats["after"].items():
        before = scores.chats.get("before", {}).get(file)
        cells = [Cell(f"{after.chats:,}")]
        for name in ("exact_match", "ended"):
            cells.append(Cell(NOTHING if before is None else percent(getattr(before, name))))
            cells.append(Cell(percent(getattr(after, name))))
        cells.append(Cell(NOTHING if before is None else number(before.answer_tokens, 1)))
        cells.append(Cell(number(after.answer_tokens, 1)))
        rows.append(TableRow(file, cells))
    header += ["base", "export"] * 3
    above = [("", 1), ("whole answer right", 2), ("ended", 2), ("tokens of an answer", 2)]
    return Table(header, rows, above)


def stage_sections(run: RecordedRun) -> list[TableSection]:
    """The stages of a run that trains in stages."""
    if run.training is None or not run.training.stages:
        return []
    rows: list[TableRow] = []
    first = 1
    for number_, stage in enumerate(run.training.stages, start=1):
        steps = stage.end_step - first + 1
        cells = [
            Cell(f"{first:,} to {stage.end_step:,}"),
            Cell(f"{stage.tokens_per_step:,}"),
            Cell(count(steps * stage.tokens_per_step)),
            Cell(_loss_until(run, first, stage.end_step)),
        ]
        rows.append(TableRow(f"{number_}, {stage.name}", cells))
        first = stage.end_step + 1
    header = ["steps", "tokens a step", "tokens", "loss of its last step"]
    return [TableSection("stages", "Stages of training", Table(header, rows))]


def _loss_until(run: RecordedRun, first: int, last: int) -> str:
    """The loss of the last recorded step of a stage."""
    curve = run.metrics.curves.get("loss")
    points = curve.points() if curve is not None else []
    within = [value for step, value in points if first <= step <= last]
    return number(within[-1]) if within else NOTHING


def cost_sections(run: RecordedRun) -> list[TableSection]:
    """What the run cost so far: tokens, time, memory and stored bytes."""
    facts: dict[str, Cell] = {}
    status = run.status
    tokens = status.tokens_seen
    if run.trained is not None and run.trained.tokens_seen is not None:
        tokens = run.trained.tokens_seen
    if tokens is not None:
        facts["tokens"] = Cell(f"{tokens:,}")
    seconds = math.fsum(run.metrics.seconds.values())
    if run.trained is not None and run.trained.seconds is not None:
        seconds = run.trained.seconds
    if seconds:
        facts["time of training"] = Cell(duration(seconds))
    if status.tokens_per_second:
        facts["speed"] = Cell(f"{status.tokens_per_second:,.0f} tokens a second")
    if run.training is not None:
        device = "GPUs" if run.metrics.trained_on_gpus else "processes on CPUs"
        facts[device] = Cell(f"{run.training.world_size:,}")
    if run.metrics.peak_memory_gib is not None:
        facts["peak memory of rank 0"] = Cell(f"{number(run.metrics.peak_memory_gib)} GiB")
    facts |= _parameters(run)
    if status.restarts:
        facts["restarts"] = Cell(f"{status.restarts:,}")
    if status.skipped_steps:
        facts["skipped steps"] = Cell(f"{status.skipped_steps:,}")
    sections: list[TableSection] = []
    if facts:
        sections.append(TableSection("costs", "Costs", _list_of(facts)))
    sections += _times(run)
    sections += _stored(run)
    return sections


def _parameters(run: RecordedRun) -> dict[str, Cell]:
    trained = run.trained
    if trained is None or trained.trainable_parameters is None:
        return {}
    shown = count(trained.trainable_parameters)
    if trained.total_parameters:
        share = percent(trained.trainable_parameters / trained.total_parameters)
        shown += f" of {count(trained.total_parameters)} ({share})"
    return {"trained parameters": Cell(shown)}


def _times(run: RecordedRun) -> list[TableSection]:
    """How long each phase of the steps took."""
    total = math.fsum(run.metrics.seconds.values())
    if not total > 0:
        return []
    rows: list[TableRow] = []
    for phase, seconds in sorted(run.metrics.seconds.items(), key=lambda item: -item[1]):
        rows.append(TableRow(phase, [Cell(duration(seconds)), Cell(percent(seconds / total))]))
    table = Table(["time", "share"], rows)
    return [TableSection("times", "Time by phase", table, "Of the main thread of rank 0.")]


def _stored(run: RecordedRun) -> list[TableSection]:
    """The bytes in the run's folder, by its parts."""
    total = sum(run.stored_bytes.values())
    rows = [TableRow(name, [Cell(stored(size))]) for name, size in run.stored_bytes.items()]
    rows.append(TableRow("all", [Cell(stored(total))]))
    return [TableSection("stored", "Stored in the run's folder", Table(["size"], rows))]


def _list_of(facts: dict[str, Cell]) -> Table:
    return Table([], [TableRow(name, [cell]) for name, cell in facts.items()])
