"""What a finished run showed: its row of the study's summary.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from pipeline.config.data import Role
from pipeline.config.method import Method, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.run_folder.status import SUMMARY
from pipeline.study.runs import StudyRun, Trial, measured_corpora

Figures = dict[str, dict[str, float]]
"""By the corpus's name, then the figure's: {"korean": {"perplexity": 9.1, ...}, ...}."""
Row = dict[str, Any]

_FROM_TRAINING = ("trainable_parameters", "total_parameters", "steps", "tokens_seen", "seconds")
# What others of the same line say.
_DERIVED = ("perplexity_growth", "forgetting")


def is_trained(config: RunConfig) -> bool:
    """Whether the run has come to the end that its configuration now has."""
    path = config.folder / SUMMARY
    return path.exists() and int(json.loads(path.read_text(encoding="utf-8"))["steps"]) >= config.schedule.steps


def row(run: StudyRun, trial: Trial, label: str, study_folder: Path) -> Row:
    """The row of a finished run."""
    folder, corpora = run.config.folder, run.config.data.corpora
    training = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    lines = read_metrics(folder / METRICS)
    looks = [(line["step"], figures) for line in lines if (figures := figures_of(line, corpora))]
    (_, before), *during, (_, after) = looks
    return {
        "label": label,
        "method": short_name(run.config.method),
        "seed": trial.seed,
        "learning_rate": trial.learning_rate,
        **{key: training[key] for key in _FROM_TRAINING},
        "peak_memory_gib": _peak_memory_gib(lines),
        "folder": str(folder.relative_to(study_folder)),
        "roles": {name: corpus.role for name, corpus in corpora.items()},
        "before": before,
        "during": [{"step": step, "figures": figures} for step, figures in during],
        "after": after,
    }


def figures_of(line: Mapping[str, Any], corpora: Iterable[str]) -> Figures:
    """The figures of each corpus in a line of metrics.jsonl, which calls them `<figure>/<corpus>`."""
    found: Figures = {}
    for name in corpora:
        for key, value in line.items():
            figure, _, corpus = key.rpartition("/")
            if corpus == name and figure and figure not in _DERIVED:
                found.setdefault(name, {})[figure] = value
    return found


def perplexity_of(run: StudyRun, role: Role) -> float | None:
    """Held-out perplexity at the end of a finished run, of the corpora of a role: their geometric mean, if any."""
    after = figures_at_end(run)
    logarithms = [math.log(after[name]["perplexity"]) for name in measured_corpora(run.config, role)]
    return math.exp(mean(logarithms)) if logarithms else None


def figures_at_end(run: StudyRun) -> Figures:
    """The figures of a finished run's last validation."""
    lines = read_metrics(run.config.folder / METRICS)
    return next(found for line in reversed(lines) if (found := figures_of(line, run.config.data.corpora)))


def short_name(method: Method) -> str:
    """fft, freeze, lora, llama_pro; of SCALE the variant."""
    return method.variant if isinstance(method, ScaleMethod) else method.name


def _peak_memory_gib(lines: Iterable[Mapping[str, Any]]) -> float | None:
    names = ("memory_peak_allocated_gib", "memory_peak_resident_gib")
    return max((line[name] for line in lines for name in names if name in line), default=None)
