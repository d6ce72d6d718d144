"""The summary of a finished study: summary.json, with a row for every run, and the tables that are printed of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.evaluation.table import readable, table
from pipeline.files import write_json
from pipeline.gating.folder import GATE_FOLDER, open_record
from pipeline.methods import training_method
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import read_spec
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.flops import count_flops
from studies.harness.derived import BY_DOCUMENT, derived_perplexities
from studies.harness.runs import StudyRun, StudyRuns
from studies.report import tables
from studies.report.groups import PERPLEXITY, Group, group, parts, value_of
from studies.report.results import SUMMARY, Row, gated_perplexities, recorded, with_perplexities


def summarise(runs: StudyRuns) -> str:
    """Writes summary.json of a finished study, and returns its tables.

    Raises:
        RunFolderError, CheckpointError, BaseModelError, DataError: the metrics, gate or model of a run cannot be read.
    """
    rows = [row for run in runs.known_runs() for row in _rows_of(run, runs)]
    write_json(runs.study.folder / SUMMARY, [row.model_dump() for row in rows])
    groups = group(rows)
    made = [
        rates_table(groups),
        as_text(tables.results(groups, parts(groups))),
        as_text(tables.costs(groups)),
    ]
    return "\n\n".join([*filter(None, made), "± is one standard deviation over seeds."])


def _rows_of(run: StudyRun, runs: StudyRuns) -> Iterator[Row]:
    """The row of a run, and at the chosen learning rate those of what it becomes without more training."""
    config, compared = run.config, runs.study.methods[run.method]
    rate = config.schedule.learning_rate
    diverged: dict[str, Any] = {"steps": config.schedule.steps, "before": {}, "after": {}}
    found = diverged if run.has_diverged else recorded(run.folder)
    row = Row(
        **found
        | {
            "label": compared.label,
            "method": config.method.variant
            if isinstance(config.method, ScaleMethod)
            else config.method.name,
            "seed": config.seed,
            "learning_rate": rate,
            "chosen": rate == runs.chosen_rate(run.method),
            "inference_cost": _inference_cost(config),
            "folder": run.name,
            "roles": {name: corpus.role for name, corpus in config.data.corpora.items()},
        }
    )
    yield row
    if not row.chosen or run.has_diverged:
        return

    if config.gate is not None:
        heldout = open_record(run.folder / GATE_FOLDER).heldout
        # A perplexity without the tokens that the gate makes impossible compares with no other.
        if not any(text.impossible_fraction for text in heldout.values()):
            yield with_perplexities(row, " + gate", gated_perplexities(heldout))
    gated = None
    if (
        compared.chosen_by is not None
        and (best := runs.chosen_rate(compared.chosen_by)) is not None
    ):
        gated = runs.compared(compared.chosen_by, best, config.seed).config
    if compared.averages or gated is not None:
        whole = compared.method.name in (
            "fft",
            "freeze",
        )  # what it trained of the base is needed as it was, too
        both = (row.total_parameters or 0) + (row.trainable_parameters or 0)
        for suffix, perplexities in derived_perplexities(config, compared.averages, gated):
            is_both = whole and suffix == BY_DOCUMENT
            yield with_perplexities(
                row, suffix, perplexities, **({"total_parameters": both} if is_both else {})
            )


def rates_table(groups: Sequence[Group]) -> str:
    """The first seed's perplexities at every learning rate of the methods that have several; empty if none has."""
    lines, shown = [], parts(groups)
    for own in groups:
        for row in own.tried if len(own.tried) > 1 else ():
            ends = [value_of(row.after, part, PERPLEXITY.figure) for part in shown.values()]
            edge = ", at the edge" if row in (own.tried[0], own.tried[-1]) else ""
            outcome = "diverged" if not row.after else f"chosen{edge}" if row.chosen else ""
            cells = ["" if end is None else readable(end) for end in ends]
            lines.append([own.label, f"{row.learning_rate:g}", *cells, outcome])
    return (
        table(["", "learning rate", *(f"{name}: perplexity" for name in shown), ""], lines)
        if lines
        else ""
    )


def as_text(shown: tables.Table) -> str:
    """A table of a report for a terminal."""
    above = [f": {name}" for name, span in shown.above for _ in range(span)] or [""] * len(
        shown.header
    )
    header = ["", *map("".join, zip(shown.header, above, strict=True))]
    return table(header, [[label, *map(" ".join, cells)] for label, _, cells in shown.rows])


def _inference_cost(config: RunConfig) -> float:
    """The FLOPs of a token's forward pass over the base's; a gate's one product of vectors does not count."""
    spec, length = read_spec(config.base), config.data.sequence_length
    with torch.device("meta"), torch.no_grad():
        models = (
            training_method(config).build(extended_spec(config, spec), SINGLE, "none"),
            Decoder(spec),
        )
        own, base = (count_flops(model, length).total for model in models)
    return own / base
