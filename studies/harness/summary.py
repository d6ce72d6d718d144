"""The summary of a finished study: summary.json, with a row for every run, and printed tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pipeline.config.method import FullFineTuning, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.evaluation.table import table
from pipeline.files.json_files import write_json
from pipeline.gating.folder import GATE_FOLDER, open_record
from pipeline.methods.registry import training_method
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import read_spec
from pipeline.parallel.topology import SINGLE
from pipeline.run_folder.metrics import readable
from pipeline.scale.plan import GATE_LAYER
from pipeline.sizing.flops import count_flops
from studies.harness.derived import BY_DOCUMENT, derived_perplexities
from studies.harness.runs import StudyRun, StudyRuns
from studies.report import tables
from studies.report.groups import PERPLEXITY, Group, group, parts, value_of
from studies.report.results import SUMMARY, Row, gated_perplexities, recorded, with_perplexities


def summarise(runs: StudyRuns) -> str:
    """Writes summary.json of a finished study, and returns its tables.

    Raises:
        RunFolderError, CheckpointError, BaseModelError, DataError: the metrics, gate or model of a
            run cannot be read.
    """
    rows: list[Row] = []
    for run in runs.known_runs():
        rows += _rows_of(run, runs)
    write_json(runs.study.folder / SUMMARY, [row.model_dump() for row in rows])
    groups = group(rows)
    parts_of_text = [
        rates_table(groups),
        as_text(tables.results(groups, parts(groups))),
        as_text(tables.costs(groups)),
        "± is one standard deviation over seeds.",
    ]
    return "\n\n".join(part for part in parts_of_text if part)


def _rows_of(run: StudyRun, runs: StudyRuns) -> Iterator[Row]:
    """The row of a run, and at the chosen learning rate those of models made of it."""
    row = _row_of(run, runs)
    yield row
    if not row.chosen or run.has_diverged:
        return
    if run.config.gate is not None:
        # The gate was measured when it was fitted; a run's metrics are those without it.
        heldout = open_record(run.folder / GATE_FOLDER).heldout
        # A perplexity without the tokens that the gate makes impossible compares with no other.
        if not any(text.impossible_fraction for text in heldout.values()):
            yield with_perplexities(row, " + gate", gated_perplexities(heldout))
    yield from _derived_rows(row, run, runs)


def _row_of(run: StudyRun, runs: StudyRuns) -> Row:
    config = run.config
    learning_rate = config.schedule.learning_rate
    if run.has_diverged:
        # A row without figures: the table of learning rates says that it diverged.
        values: dict[str, Any] = {"steps": config.schedule.steps, "before": {}, "after": {}}
    else:
        values = recorded(run.folder)
    if isinstance(config.method, ScaleMethod):
        method: str = config.method.variant
    else:
        method = config.method.name
    values["label"] = runs.study.methods[run.method].label
    values["method"] = method
    values["seed"] = config.seed
    values["learning_rate"] = learning_rate
    values["chosen"] = learning_rate == runs.chosen_rate(run.method)
    values["inference_cost"] = _inference_cost(config)
    values["folder"] = run.name
    values["roles"] = {name: corpus.role for name, corpus in config.data.corpora.items()}
    return Row(**values)


def _derived_rows(row: Row, run: StudyRun, runs: StudyRuns) -> Iterator[Row]:
    """The rows of averages with the base, and of the base or the run's model by document."""
    compared = runs.study.methods[run.method]
    gated: RunConfig | None = None
    if compared.chosen_by is not None:
        rate = runs.chosen_rate(compared.chosen_by)
        if rate is not None:
            gated = runs.compared(compared.chosen_by, rate, run.config.seed).config
    if not compared.averages and gated is None:
        return

    for suffix, perplexities in derived_perplexities(run.config, compared.averages, gated):
        changes: dict[str, Any] = {}
        if suffix == BY_DOCUMENT and compared.method.name in ("fft", "freeze"):
            # Two whole models: what the method trains of the base is needed as it was, too.
            total = row.total_parameters or 0
            trained = row.trainable_parameters or 0
            changes["total_parameters"] = total + trained
        yield with_perplexities(row, suffix, perplexities, **changes)


def rates_table(groups: Sequence[Group]) -> str:
    """The perplexities at every learning rate of the methods that have several; empty if none has.

    All are of the first seed.
    """
    shown = parts(groups)
    lines: list[list[str]] = []
    for own in groups:
        if len(own.tried) < 2:
            continue
        for row in own.tried:
            line = [own.label, f"{row.learning_rate:g}"]
            for part in shown.values():
                perplexity = value_of(row.after, part, PERPLEXITY.figure)
                line.append("" if perplexity is None else readable(perplexity))
            line.append(_outcome(row, own))
            lines.append(line)
    if not lines:
        return ""
    header = ["", "learning rate", *(f"{name}: perplexity" for name in shown), ""]
    return table(header, lines)


def _outcome(row: Row, own: Group) -> str:
    """Whether a run at one of several learning rates diverged, or was chosen."""
    if not row.after:
        return "diverged"
    if not row.chosen:
        return ""
    if row in (own.tried[0], own.tried[-1]):
        # A better rate may lie beyond those that were tried.
        return "chosen, at the edge"
    return "chosen"


def as_text(shown: tables.Table) -> str:
    """A table of a report for a terminal."""
    header = ["", *shown.header]
    # A terminal has no cells over several columns: each column has the name of its group.
    column = 1
    for name, span in shown.above:
        for _ in range(span):
            header[column] += f": {name}"
            column += 1
    lines: list[list[str]] = []
    for label, _, cells in shown.rows:
        line = [label]
        for cell in cells:
            line.append(f"{cell.text} {cell.small}")
        lines.append(line)
    return table(header, lines)


def _inference_cost(config: RunConfig) -> float:
    """The FLOPs of a token's forward pass over the base's.

    Of a gate they are one product of vectors, which does not count.
    """
    spec = read_spec(config.base)
    length = config.data.sequence_length
    # Counting runs both models: without gradients, which would count too.
    with torch.device("meta"), torch.no_grad():
        own = training_method(config).build(extended_spec(config, spec), SINGLE, "none")
        base = Decoder(spec)
        cost = count_flops(own, length).total / count_flops(base, length).total
    if config.gate is not None and isinstance(config.method, FullFineTuning):
        # Of open text: the gate reads the base's lower layers beside the trained model.
        cost += min(config.gate.layer or GATE_LAYER, spec.num_layers) / spec.num_layers
    return cost
