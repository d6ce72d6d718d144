"""The results of a study: summary.json, with a row for every run, and the tables that are printed of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.config.method import ScaleMethod
from pipeline.errors import RunFolderError
from pipeline.evaluation.table import cell, over_seeds, readable, table
from pipeline.files import first_fault, read_bytes, read_object, write_json
from pipeline.run_folder.metrics import METRICS, Figures, History, ValidationRecord, geometric_mean, mean, read_history
from pipeline.run_folder.status import TRAINING, is_trained
from pipeline.studies.derived import BY_DOCUMENT, derived_perplexities, inference_cost
from pipeline.studies.runs import StudyRuns

SUMMARY = "summary.json"
REPLAY = "replay"
"""The role of corpora that must not be forgotten."""
_FROM_TRAINING = ("trainable_parameters", "total_parameters", "tokens_seen", "seconds")
"""What a row takes from training.json."""
_ANSWERED = "first_token_accuracy"
_ADVICE = "write or copy the file again"


class Row(BaseModel):
    """A row of summary.json: a run, or what its gate or an average with its base makes of it.

    Files from elsewhere may lack what is optional.

    Attributes:
        chosen: whether the run has the learning rate of its method that was chosen. `after` is empty where it diverged.
        inference_cost: the FLOPs of a forward pass over the base's.
        source: the folder that a report has read it from.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    method: str | None = None
    seed: int | None = None
    learning_rate: float | None = None
    chosen: bool = True
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    inference_cost: float | None = None
    steps: int
    tokens_seen: int | None = None
    seconds: float | None = None
    peak_memory_gib: float | None = None
    folder: str | None = None
    source: str = Field(default="", exclude=True)
    roles: dict[str, str]
    before: Figures
    during: list[ValidationRecord] = []
    after: Figures

    @property
    def validations(self) -> list[ValidationRecord]:
        """Every validation, from step 0 to the last step."""
        first = ValidationRecord(step=0, figures=self.before)
        return [first, *self.during, ValidationRecord(step=self.steps, figures=self.after)]

    def perplexity(self, role: str) -> float | None:
        """The geometric mean at the end over the corpora of a role; None without any."""
        own = [figures for name, figures in self.after.items() if self.roles.get(name) == role]
        known = [figures["perplexity"] for figures in own if "perplexity" in figures]
        return geometric_mean(known) if known else None


def summarise(runs: StudyRuns) -> str:
    """Writes summary.json of a finished study, and returns its tables.

    Raises:
        RunFolderError: the metrics of a run are missing or damaged.
        CheckpointError, BaseModelError, DataError: a model that is averaged, or a gate, cannot be read.
    """
    rows: list[Row] = []
    costs = {name: inference_cost(runs.grid(name)[0].config) for name in runs.study.methods}
    for run in runs.known_runs():
        compared, config = runs.study.methods[run.method], run.config
        found: dict[str, Any] = {"steps": config.schedule.steps, "before": {}, "after": {}}
        if not run.has_diverged:
            found = recorded(run.folder, read_history(run.folder / METRICS))
        row = Row(
            label=compared.label,
            method=config.method.variant if isinstance(config.method, ScaleMethod) else config.method.name,
            seed=config.seed,
            learning_rate=run.learning_rate,
            chosen=run.learning_rate == runs.chosen_rate(run.method),
            inference_cost=costs[run.method],
            folder=run.name,
            roles={name: corpus.role for name, corpus in config.data.corpora.items()},
            **found,
        )
        rows.append(row)
        if row.chosen:
            gated = None
            if (method := compared.chosen_by) is not None and (rate := runs.chosen_rate(method)) is not None:
                gated = runs.compared(method, rate, config.seed).config
            for suffix, perplexities in derived_perplexities(config, compared.averages, gated):
                changes: dict[str, Any] = {
                    "label": f"{row.label}{suffix}",
                    "inference_cost": 1.0 if compared.averages else row.inference_cost,
                    "folder": None,
                    "during": [],
                    "after": _scored(row.before, perplexities),
                }
                if suffix == BY_DOCUMENT and compared.method.name in ("fft", "freeze"):
                    # What it trained of the base is needed as it was, too.
                    changes["total_parameters"] = (row.total_parameters or 0) + (row.trainable_parameters or 0)
                rows.append(row.model_copy(update=changes))
    write_json(runs.study.folder / SUMMARY, [row.model_dump() for row in rows])
    return "\n\n".join(filter(None, [rates_table(rows), methods_table(rows)]))


def recorded(folder: Path, history: History) -> dict[str, Any]:
    """What the folder of a run, finished or not, and its metrics say for its row."""
    before, *during, after = history.validations
    trained = read_object(folder / TRAINING, RunFolderError) if is_trained(folder) else {}
    return {
        **{key: trained[key] for key in _FROM_TRAINING if key in trained},
        "steps": after.step,
        "peak_memory_gib": history.peak_memory_gib,
        "before": before.figures,
        "during": during,
        "after": after.figures,
    }


def _scored(before: Figures, perplexities: Mapping[str, float]) -> Figures:
    """The figures of a model with these perplexities. Bits per byte are in proportion to the logarithm, as before."""
    found: Figures = {}
    for name, perplexity in perplexities.items():
        bits = before[name]["bits_per_byte"] * math.log(perplexity) / math.log(before[name]["perplexity"])
        found[name] = {"perplexity": perplexity, "bits_per_byte": bits}
    return found


def read_rows(folder: Path) -> list[Row]:
    """The rows of a study's summary.json, at least one.

    Raises:
        RunFolderError: the study is not finished, or the file is damaged or of another format.
    """
    path = folder / SUMMARY
    try:
        rows = TypeAdapter(list[Row]).validate_json(read_bytes(path, RunFolderError, _ADVICE))
    except FileNotFoundError:
        raise RunFolderError(
            f"{path}: no such file; expected a study's folder, where scale-cpt study writes it at the end, or a run's "
            f"with its {METRICS}"
        ) from None
    except ValidationError as error:
        raise RunFolderError(f"{path}: {first_fault(error)}; {_ADVICE}") from None
    if not rows:
        raise RunFolderError(f"{path}: expected at least one row, found none; {_ADVICE}")
    return rows


def by_label(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each label, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.label, []).append(row)
    return found


def rates_table(rows: Sequence[Row]) -> str:
    """The first seed's figures at every learning rate of the methods that have several; empty if none has."""
    lines = []
    for own in by_label(rows).values():
        rates = [row.learning_rate for row in own if row.learning_rate is not None]
        for row in own if len(set(rates)) > 1 else ():
            if row.seed == own[0].seed:
                ends = ["" if end is None else readable(end) for end in map(row.perplexity, ("new", REPLAY))]
                at_edge = ", at the edge" if row.learning_rate in (min(rates), max(rates)) else ""
                mark = "diverged" if not row.after else f"chosen{at_edge}" if row.chosen else ""
                lines.append([row.label, f"{row.learning_rate:g}", *ends, mark])
    return table(["", "learning rate", "new: perplexity", "replay: perplexity", ""], lines) if lines else ""


def methods_table(rows: Sequence[Row]) -> str:
    """What each method learned and forgot of texts: means over its seeds, and the spread of what it ended with.

    Answers to questions are in summary.json, and in a report.
    """
    rows = [row for row in rows if row.chosen]
    first = rows[0]
    texts = [name for name in first.roles if name in first.after and _ANSWERED not in first.after[name]]
    header = ["", "trained", "FLOPs x", "learning rate", "seconds", "GiB"]
    for name in texts:
        header += [f"{name}: perplexity", "before", "bits per byte"]
    lines = []
    for label, own in by_label(rows).items():
        seconds = [row.seconds for row in own if row.seconds is not None]
        memory = [row.peak_memory_gib for row in own if row.peak_memory_gib is not None]
        cells = [
            label,
            cell(own[0].trainable_parameters, ","),
            cell(own[0].inference_cost, ".2f"),
            cell(own[0].learning_rate, "g"),
            cell(mean(seconds) if seconds else None, ".0f"),
            cell(max(memory, default=None), ".2f"),
        ]
        for name in texts:
            bits = mean([row.after[name]["bits_per_byte"] for row in own])
            after = over_seeds([row.after[name]["perplexity"] for row in own], readable)
            cells += [after, readable(own[0].before[name]["perplexity"]), f"{bits:.3f}"]
        lines.append(cells)
    several = any(row.seed != first.seed for row in rows)
    return table(header, lines) + ("\n\n± is one standard deviation over seeds, as of a sample." if several else "")
