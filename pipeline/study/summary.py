"""The end of a study: summary.json, a row a method and seed, and what a person reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.evaluation.table import cell, over_seeds, readable, table
from pipeline.run_folder.averages import mean
from pipeline.run_folder.looks import Figures
from pipeline.run_folder.study_summary import Row, Tried, write_summary
from pipeline.study.choice import is_at_the_edge
from pipeline.study.due import best_rate, outcomes
from pipeline.study.results import Outcome, read_outcome
from pipeline.study.runs import StudyRuns, Trial

_ANSWERED = "first_token_accuracy"


@dataclass(frozen=True)
class Summary:
    """The rows of summary.json, and what came of each learning rate that was tried."""

    rows: list[Row]
    tried: list[Tried]

    def as_text(self) -> str:
        """The learning rates, and what was learned and forgotten, a row a method."""
        first = self.rows[0]
        header = ["", "trained", "learning rate", "seconds", "GiB"]
        for name in _texts(first):
            header += [f"{name}: perplexity", "before", "bits per byte"]
        for role in _asked(first):
            header += [f"{role}: first token", "before"]
        labels = dict.fromkeys(row.label for row in self.rows)
        lines = [_line([row for row in self.rows if row.label == label]) for label in labels]
        several = any(row.seed != first.seed for row in self.rows)
        note = "\n\n± is one standard deviation over seeds, as of a sample." if several else ""
        return f"{_rates(self.tried)}\n\n{table(header, lines)}{note}"


def summarise(runs: StudyRuns) -> Summary:
    """Reads all runs of a finished study, each once, and writes summary.json and learning_rates.json into its folder.

    Raises:
        RunFolderError: the figures of a run are gone or damaged.
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
        tried += [
            _tried(trial, outcome, compared.label, chosen=trial.learning_rate == rate, at_the_edge=at_the_edge)
            for trial, outcome in found.items()
        ]
    write_summary(study.folder, rows, tried)
    return Summary(rows, tried)


def _tried(trial: Trial, outcome: Outcome | None, label: str, *, chosen: bool, at_the_edge: bool) -> Tried:
    new, replay = (outcome.perplexity(role, outcome.after) if outcome else None for role in ("new", "replay"))
    return Tried(
        label=label,
        learning_rate=trial.learning_rate,
        seed=trial.seed,
        new_perplexity=new,
        replay_perplexity=replay,
        after=outcome.after if outcome else {},
        chosen=chosen,
        at_the_edge=chosen and at_the_edge,
    )


def _rates(tried: Sequence[Tried]) -> str:
    rows = []
    for one in tried:
        after = [readable(value) if value is not None else "" for value in (one.new_perplexity, one.replay_perplexity)]
        mark = "chosen, at the edge" if one.at_the_edge else "chosen" if one.chosen else ""
        rows.append([one.label, f"{one.learning_rate:g}", *after, "diverged" if one.diverged else mark])
    return table(["", "learning rate", "new: perplexity", "replay: perplexity", ""], rows)


def _line(rows: Sequence[Row]) -> list[str]:
    """One method over all its seeds: means, and the spread of what it ended with."""
    first = rows[0]
    seconds = [one.seconds for one in rows if one.seconds is not None]
    memory = [one.peak_memory_gib for one in rows if one.peak_memory_gib is not None]
    cells = [
        first.label,
        cell(first.trainable_parameters, ","),
        cell(first.learning_rate, "g"),
        cell(mean(seconds) if seconds else None, ".0f"),
        cell(max(memory, default=None), ".2f"),
    ]
    for name in _texts(first):
        after = [one.after[name]["perplexity"] for one in rows]
        bits = mean([one.after[name]["bits_per_byte"] for one in rows])
        cells += [over_seeds(after, readable), readable(first.before[name]["perplexity"]), f"{bits:.3f}"]
    for names in _asked(first).values():
        before, after = ([_known(row.before, names) for row in rows], [_known(row.after, names) for row in rows])
        cells += [over_seeds(after, "{:.1%}".format), f"{mean(before):.1%}"]
    return cells


def _texts(row: Row) -> list[str]:
    """The corpora with a held-out part that asks nothing."""
    return [name for name in row.roles if name in row.after and _ANSWERED not in row.after[name]]


def _asked(row: Row) -> dict[str, list[str]]:
    """The corpora of questions and answers, by their role: one mean stands for those of a role."""
    roles: dict[str, list[str]] = {}
    for name, role in row.roles.items():
        if _ANSWERED in row.after.get(name, {}):
            roles.setdefault(role, []).append(name)
    return roles


def _known(figures: Figures, names: Sequence[str]) -> float:
    return mean([figures[name][_ANSWERED] for name in names])
