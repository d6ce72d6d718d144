"""The end of a study: summary.json, a row a method and seed, and what a person reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from pipeline.evaluation.table import readable, table
from pipeline.files import write_json
from pipeline.study.choice import is_at_the_edge
from pipeline.study.due import chosen_rate, grid
from pipeline.study.results import Row, figures_at_end, perplexity_of, row
from pipeline.study.runs import StudyRuns, Trial

SUMMARY = "summary.json"
LEARNING_RATES = "learning_rates.json"
_ANSWERED = "first_token_accuracy"


@dataclass(frozen=True)
class Summary:
    """The rows of summary.json, and what came of each learning rate that was tried."""

    rows: list[Row]
    tried: list[dict[str, Any]]

    def as_text(self) -> str:
        """The learning rates, and what was learned and forgotten, a row a method."""
        labels = list(dict.fromkeys(row["label"] for row in self.rows))
        rows = [_line([row for row in self.rows if row["label"] == label]) for label in labels]
        answered = _answered(self.rows[0])
        header = ["", "trained", "learning rate", "seconds", "GiB"]
        for name in self.rows[0]["roles"]:
            if not any(name in names for names in answered.values()):
                header += [f"{name}: perplexity", "before", "bits per byte"]
        for role in answered:
            header += [f"{role}: first token", "before"]
        return f"{_rates(self.tried)}\n\n{table(header, rows)}"


def summarise(runs: StudyRuns) -> Summary:
    """Reads all runs of a finished study, and writes summary.json and learning_rates.json into its folder."""
    study = runs.study
    rows: list[Row] = []
    tried: list[dict[str, Any]] = []
    for name, compared in study.methods.items():
        rate = chosen_rate(runs, name)
        if rate is None:
            raise AssertionError(f"{name}: the study is not finished")
        for seed in study.seeds:
            trial = Trial(name, rate, seed)
            rows.append(row(runs.trial(trial), trial, compared.label, study.folder))
        for trial in grid(runs, name):
            run = runs.trial(trial)
            chosen = trial.learning_rate == rate
            tried.append(
                {
                    "label": compared.label,
                    "learning_rate": trial.learning_rate,
                    "seed": trial.seed,
                    "new_perplexity": perplexity_of(run, "new"),
                    "replay_perplexity": perplexity_of(run, "replay"),
                    "after": figures_at_end(run),
                    "chosen": chosen,
                    "at_the_edge": chosen and is_at_the_edge(rate, compared.learning_rates),
                }
            )
    write_json(study.folder / SUMMARY, rows)
    write_json(study.folder / LEARNING_RATES, tried)
    return Summary(rows, tried)


def _rates(tried: Sequence[dict[str, Any]]) -> str:
    rows = []
    for one in tried:
        after = [readable(one[key]) if one[key] is not None else "" for key in ("new_perplexity", "replay_perplexity")]
        mark = "chosen, at the edge" if one["at_the_edge"] else "chosen" if one["chosen"] else ""
        rows.append([one["label"], f"{one['learning_rate']:g}", *after, mark])
    return table(["", "learning rate", "new: perplexity", "replay: perplexity", ""], rows)


def _line(rows: Sequence[Row]) -> list[str]:
    """One method over all its seeds: means, and the spread of perplexities (one standard deviation)."""
    first = rows[0]
    trained = f"{first['trainable_parameters']:,}"
    memory = [one["peak_memory_gib"] for one in rows if one["peak_memory_gib"] is not None]
    cells = [first["label"], trained, f"{first['learning_rate']:g}", f"{mean(one['seconds'] for one in rows):.0f}"]
    cells.append(f"{max(memory):.2f}" if memory else "")
    answered = _answered(first)
    for name in first["roles"]:
        if any(name in names for names in answered.values()):
            continue
        if name not in first["after"]:
            cells += ["", "", ""]
            continue
        after = [one["after"][name]["perplexity"] for one in rows]
        spread = f" ±{readable(stdev(after))}" if len(after) > 1 else ""
        bits = mean(one["after"][name]["bits_per_byte"] for one in rows)
        cells += [readable(mean(after)) + spread, readable(first["before"][name]["perplexity"]), f"{bits:.3f}"]
    for names in answered.values():
        known = [mean(one[when][name][_ANSWERED] for one in rows for name in names) for when in ("after", "before")]
        cells += [f"{share:.1%}" for share in known]
    return cells


def _answered(row: Row) -> dict[str, list[str]]:
    """The corpora of questions and answers, by their role: one mean stands for those of a role."""
    roles: dict[str, list[str]] = {}
    for name, role in row["roles"].items():
        if _ANSWERED in row["after"].get(name, {}):
            roles.setdefault(role, []).append(name)
    return roles
