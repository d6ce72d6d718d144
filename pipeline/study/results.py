"""What a finished run left in its folder, read once: how its row of the study's summary is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.data import Role
from pipeline.config.method import Method, ScaleMethod
from pipeline.run_folder.averages import geometric_mean
from pipeline.run_folder.looks import Figures, Look, looks_of, peak_memory_gib
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.run_folder.status import SUMMARY
from pipeline.run_folder.study_summary import Row
from pipeline.study.runs import StudyRun, Trial, measured_corpora
from pipeline.training.divergence import REPORT as DIVERGENCE

_FROM_TRAINING = ("trainable_parameters", "total_parameters", "steps", "tokens_seen", "seconds")


@dataclass(frozen=True)
class Outcome:
    """What a finished run left: the trainer's figures, and every validation from step 0 to the last step."""

    run: StudyRun
    training: Mapping[str, Any]
    looks: list[Look]
    peak_memory_gib: float | None

    @property
    def before(self) -> Figures:
        """What the base knew."""
        return self.looks[0].figures

    @property
    def after(self) -> Figures:
        """What is known at the end."""
        return self.looks[-1].figures

    def perplexity(self, role: Role, figures: Figures) -> float | None:
        """Of a role's held-out corpora in `figures`: the geometric mean, infinite where one is; None without any."""
        names = measured_corpora(self.run.config, role)
        return geometric_mean([figures[name]["perplexity"] for name in names]) if names else None

    def row(self, trial: Trial, label: str, study_folder: Path) -> Row:
        """Its row of the study's summary."""
        config = self.run.config
        return Row(
            label=label,
            method=short_name(config.method),
            seed=trial.seed,
            learning_rate=trial.learning_rate,
            **{key: self.training[key] for key in _FROM_TRAINING},
            peak_memory_gib=self.peak_memory_gib,
            folder=str(config.folder.relative_to(study_folder)),
            roles={name: corpus.role for name, corpus in config.data.corpora.items()},
            before=self.before,
            during=self.looks[1:-1],
            after=self.after,
        )


def read_outcome(run: StudyRun) -> Outcome:
    """What a finished run left.

    Raises:
        RunFolderError: its figures are gone or damaged.
    """
    path = run.config.folder / METRICS
    lines = read_metrics(path)
    return Outcome(run, _training(run), looks_of(lines, path), peak_memory_gib(lines))


def is_trained(run: StudyRun) -> bool:
    """Whether the run has come to its end.

    Raises:
        ConfigError: one has in its folder, but with other settings.
    """
    if not (run.config.folder / SUMMARY).exists():
        return False
    run.check_same()
    return int(_training(run)["steps"]) >= run.config.schedule.steps


def has_diverged(run: StudyRun) -> bool:
    """Whether the run left the road and did not come to its end."""
    return (run.config.folder / DIVERGENCE).exists() and not is_trained(run)


def short_name(method: Method) -> str:
    """fft, freeze, lora, llama_pro; of SCALE the variant."""
    return method.variant if isinstance(method, ScaleMethod) else method.name


def _training(run: StudyRun) -> Mapping[str, Any]:
    values: Mapping[str, Any] = json.loads((run.config.folder / SUMMARY).read_text(encoding="utf-8"))
    return values
