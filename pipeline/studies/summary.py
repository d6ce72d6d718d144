"""The end of a study: summary.json, learning_rates.json, and the tables that are printed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.evaluation.table import cell, over_seeds, readable, table
from pipeline.run_folder.metrics import mean
from pipeline.studies.pending import best_rate, is_at_the_edge, outcomes
from pipeline.studies.results import Row, Tried, read_outcome, write_summary
from pipeline.studies.study_runs import StudyRuns, Trial

_ANSWERED = "first_token_accuracy"


@dataclass(frozen=True)
class Summary:
    """The rows of summary.json, and those of learning_rates.json."""

    rows: list[Row]
    tried: list[Tried]

    def as_text(self) -> str:
        """Two tables: the learning rates, and what each method learned and forgot."""
        first = self.rows[0]
        header = ["", "trained", "learning rate", "seconds", "GiB"]
        for name in _texts(first):
            header += [f"{name}: perplexity", "before", "bits per byte"]
        for role in _questions(first):
            header += [f"{role}: first token", "before"]
        labels = dict.fromkeys(row.label for row in self.rows)
        lines = [_method_line([row for row in self.rows if row.label == label]) for label in labels]
        several = any(row.seed != first.seed for row in self.rows)
        note = "\n\n± is one standard deviation over seeds, as of a sample." if several else ""
        return f"{_rates_table(self.tried)}\n\n{table(header, lines)}{note}"


def summarise(runs: StudyRuns) -> Summary:
    """Reads all runs of a finished study, and writes summary.json and learning_rates.json into its folder.

    Raises:
        RunFolderError: the metrics of a run are missing or damaged.
    """
    study = runs.study
    rows: list[Row] = []
    tried: list[Tried] = []
    for name, compared in study.methods.items():
        found = outcomes(runs, name)
        rate = best_rate(found)
        for seed in study.seeds:
            trial = Trial(name, rate, seed)
            outcome = found.get(trial) or read_outcome(runs.trial(trial))
            rows.append(outcome.row(trial, compared.label, study.folder))
        at_the_edge = is_at_the_edge(rate, compared.learning_rates)
        for trial, own in found.items():
            chosen = trial.learning_rate == rate
            after = own.after if own else {}
            tried.append(
                Tried(
                    label=compared.label,
                    learning_rate=trial.learning_rate,
                    seed=trial.seed,
                    new_perplexity=own.perplexity("new", after) if own else None,
                    replay_perplexity=own.perplexity("replay", after) if own else None,
                    after=after,
                    chosen=chosen,
                    at_the_edge=chosen and at_the_edge,
                )
            )
    write_summary(study.folder, rows, tried)
    return Summary(rows, tried)


def _rates_table(tried: Sequence[Tried]) -> str:
    rows = []
    for run in tried:
        after = [readable(value) if value is not None else "" for value in (run.new_perplexity, run.replay_perplexity)]
        mark = "chosen, at the edge" if run.at_the_edge else "chosen" if run.chosen else ""
        rows.append([run.label, f"{run.learning_rate:g}", *after, "diverged" if run.diverged else mark])
    return table(["", "learning rate", "new: perplexity", "replay: perplexity", ""], rows)


def _method_line(rows: Sequence[Row]) -> list[str]:
    """One method: means over its seeds, and the spread of what it ended with."""
    first = rows[0]
    seconds = [row.seconds for row in rows if row.seconds is not None]
    memory = [row.peak_memory_gib for row in rows if row.peak_memory_gib is not None]
    cells = [
        first.label,
        cell(first.trainable_parameters, ","),
        cell(first.learning_rate, "g"),
        cell(mean(seconds) if seconds else None, ".0f"),
        cell(max(memory, default=None), ".2f"),
    ]
    for name in _texts(first):
        bits = mean([row.after[name]["bits_per_byte"] for row in rows])
        after = over_seeds([row.after[name]["perplexity"] for row in rows], readable)
        cells += [after, readable(first.before[name]["perplexity"]), f"{bits:.3f}"]
    for names in _questions(first).values():
        before, known = (
            [mean([figures[name][_ANSWERED] for name in names]) for figures in of_rows]
            for of_rows in ([row.before for row in rows], [row.after for row in rows])
        )
        cells += [over_seeds(known, "{:.1%}".format), f"{mean(before):.1%}"]
    return cells


def _texts(row: Row) -> list[str]:
    """The corpora with a held-out part that are plain text."""
    return [name for name in row.roles if name in row.after and _ANSWERED not in row.after[name]]


def _questions(row: Row) -> dict[str, list[str]]:
    """The corpora of questions and answers, by role; a table has the mean of each role."""
    roles: dict[str, list[str]] = {}
    for name, role in row.roles.items():
        if _ANSWERED in row.after.get(name, {}):
            roles.setdefault(role, []).append(name)
    return roles
