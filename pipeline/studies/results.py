"""The results of a study: summary.json, learning_rates.json, and the tables that are printed of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.config.method import ScaleMethod
from pipeline.errors import RunFolderError, in_one_line
from pipeline.evaluation.table import cell, over_seeds, readable, table
from pipeline.files import first_fault, read_object, read_text, write_json
from pipeline.run_folder.metrics import METRICS, Figures, ValidationRecord, mean, peak_memory_gib, read_metrics
from pipeline.run_folder.status import TRAINING
from pipeline.studies.runs import StudyRun, StudyRuns, Trial

SUMMARY = "summary.json"
LEARNING_RATES = "learning_rates.json"
REPLAY = "replay"
"""The role of corpora that must not be forgotten."""
FROM_TRAINING = ("trainable_parameters", "total_parameters", "tokens_seen", "seconds")
"""What a row takes from training.json."""
_ANSWERED = "first_token_accuracy"


class Row(BaseModel):
    """A row of summary.json: a method and seed at its chosen rate. Files from elsewhere may lack what is optional."""

    model_config = ConfigDict(frozen=True)

    label: str
    method: str | None = None
    seed: int | None = None
    learning_rate: float | None = None
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    steps: int
    tokens_seen: int | None = None
    seconds: float | None = None
    peak_memory_gib: float | None = None
    folder: str | None = None
    roles: dict[str, str]
    before: Figures
    during: list[ValidationRecord] = []
    after: Figures

    @property
    def validations(self) -> list[ValidationRecord]:
        """Every validation, from step 0 to the last step."""
        first = ValidationRecord(step=0, figures=self.before)
        return [first, *self.during, ValidationRecord(step=self.steps, figures=self.after)]


class Tried(BaseModel):
    """A row of learning_rates.json: a method at one rate of its grid. Perplexities are means over a role's corpora."""

    model_config = ConfigDict(frozen=True)

    label: str
    learning_rate: float
    seed: int | None = None
    new_perplexity: float | None = None
    replay_perplexity: float | None = None
    after: Figures = Field(description="empty where training diverged")
    chosen: bool
    at_the_edge: bool


def summarise(runs: StudyRuns) -> str:
    """Writes summary.json and learning_rates.json of a finished study, and returns both as tables.

    Raises:
        RunFolderError: the metrics of a run are missing or damaged.
    """
    study = runs.study
    rows: list[Row] = []
    tried: list[Tried] = []
    for name, compared in study.methods.items():
        rate, rates = runs.chosen_rate(name), compared.learning_rates
        assert rate is not None  # all runs are finished
        for seed in study.seeds:
            run = runs.trial(Trial(name, rate, seed))
            rows.append(_row(run, compared.label, str(run.folder.relative_to(study.folder))))
        for trial in runs.grid(name):
            run = runs.trial(trial)
            after = {} if run.has_diverged else run.validations()[-1].figures
            chosen = trial.learning_rate == rate
            tried.append(
                Tried(
                    label=compared.label,
                    learning_rate=trial.learning_rate,
                    seed=trial.seed,
                    new_perplexity=run.perplexity("new", after) if after else None,
                    replay_perplexity=run.perplexity("replay", after) if after else None,
                    after=after,
                    chosen=chosen,
                    at_the_edge=chosen and len(rates) > 1 and rate in (min(rates), max(rates)),
                )
            )
    write_summary(study.folder, rows, tried)
    return f"{_rates_table(tried)}\n\n{methods_table(rows)}"


def _row(run: StudyRun, label: str, folder: str) -> Row:
    config, method = run.config, run.config.method
    before, *during, after = run.validations()
    training = read_object(run.folder / TRAINING, RunFolderError)
    return Row(
        label=label,
        method=method.variant if isinstance(method, ScaleMethod) else method.name,
        seed=config.seed,
        learning_rate=config.schedule.learning_rate,
        steps=training["steps"],
        **{key: training[key] for key in FROM_TRAINING},
        peak_memory_gib=peak_memory_gib(read_metrics(run.folder / METRICS)),
        folder=folder,
        roles={name: corpus.role for name, corpus in config.data.corpora.items()},
        before=before.figures,
        during=during,
        after=after.figures,
    )


def write_summary(folder: Path, rows: Sequence[Row], tried: Sequence[Tried]) -> None:
    """Writes both files; infinite values are null in them."""
    # summary.json last: where it exists, the rates exist too.
    write_json(folder / LEARNING_RATES, [row.model_dump() for row in tried])
    write_json(folder / SUMMARY, [row.model_dump() for row in rows])


def read_rows(folder: Path) -> list[Row]:
    """The rows of a study's summary.json, at least one.

    Raises:
        RunFolderError: the study is not finished, or the file is damaged or of another format.
    """
    return _read(folder / SUMMARY, Row)


def read_tried(folder: Path) -> list[Tried]:
    """The rows of its learning_rates.json; raises what `read_rows` does."""
    return _read(folder / LEARNING_RATES, Tried)


RowType = TypeVar("RowType", Row, Tried)


def checked_rows(kind: type[RowType], values: object, path: Path) -> list[RowType]:
    """`values`, which were read at `path`, as rows; raises RunFolderError where they are not."""
    try:
        rows = TypeAdapter(list[kind]).validate_python(values)  # type: ignore[valid-type]
    except ValidationError as error:
        raise RunFolderError(f"{path}: {first_fault(error)}; write or copy the file again") from None
    if not rows:
        raise RunFolderError(f"{path}: expected at least one row, found none")
    return rows


def _read(path: Path, kind: type[RowType]) -> list[RowType]:
    try:
        # Not orjson: NaN and Infinity, which other programs write, have their meaning here.
        values = json.loads(read_text(path, RunFolderError))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path}: not JSON ({in_one_line(error):.100}); write or copy the file again") from None
    except FileNotFoundError:
        raise RunFolderError(
            f"{path}: no such file; scale-cpt study writes it when the study is finished: run it again"
        ) from None
    return checked_rows(kind, values, path)


def _rates_table(tried: Sequence[Tried]) -> str:
    lines = []
    for run in tried:
        after = [readable(value) if value is not None else "" for value in (run.new_perplexity, run.replay_perplexity)]
        mark = "chosen, at the edge" if run.at_the_edge else "chosen" if run.chosen else ""
        lines.append([run.label, f"{run.learning_rate:g}", *after, mark if run.after else "diverged"])
    return table(["", "learning rate", "new: perplexity", "replay: perplexity", ""], lines)


def methods_table(rows: Sequence[Row]) -> str:
    """What each method learned and forgot: means over its seeds, and the spread of what it ended with."""
    first = rows[0]
    texts = [name for name in first.roles if name in first.after and _ANSWERED not in first.after[name]]
    # The corpora of questions and answers share a column for each role.
    questions: dict[str, list[str]] = {}
    for name, role in first.roles.items():
        if _ANSWERED in first.after.get(name, {}):
            questions.setdefault(role, []).append(name)
    header = ["", "trained", "learning rate", "seconds", "GiB"]
    for name in texts:
        header += [f"{name}: perplexity", "before", "bits per byte"]
    for role in questions:
        header += [f"{role}: first token", "before"]
    lines = []
    for label in dict.fromkeys(row.label for row in rows):
        own = [row for row in rows if row.label == label]
        seconds = [row.seconds for row in own if row.seconds is not None]
        memory = [row.peak_memory_gib for row in own if row.peak_memory_gib is not None]
        cells = [
            label,
            cell(own[0].trainable_parameters, ","),
            cell(own[0].learning_rate, "g"),
            cell(mean(seconds) if seconds else None, ".0f"),
            cell(max(memory, default=None), ".2f"),
        ]
        for name in texts:
            after = over_seeds([row.after[name]["perplexity"] for row in own], readable)
            bits = mean([row.after[name]["bits_per_byte"] for row in own])
            cells += [after, readable(own[0].before[name]["perplexity"]), f"{bits:.3f}"]
        for names in questions.values():
            known = [mean([row.after[name][_ANSWERED] for name in names]) for row in own]
            before = mean([row.before[name][_ANSWERED] for row in own for name in names])
            cells += [over_seeds(known, "{:.1%}".format), f"{before:.1%}"]
        lines.append(cells)
    several = any(row.seed != first.seed for row in rows)
    return table(header, lines) + ("\n\n± is one standard deviation over seeds, as of a sample." if several else "")
