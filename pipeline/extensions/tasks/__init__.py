"""lm-eval's tasks: asked of Hugging Face folders, and of a model in training.

`benchmarks.py` loads tasks and asks a folder's model, for `scale-cpt evaluate --tasks`
(`evaluator.py`). `training_tasks.py` asks the model in training what `validation.tasks` names
(`checks.py` and `observer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.extension import CheckedStage, Extension, InputCheck

if TYPE_CHECKING:
    from pipeline.training.observer import Observer
    from pipeline.training.trainer import Trainer


class Tasks(Extension):
    name = "tasks"

    def input_checks(self, stage: CheckedStage) -> Sequence[InputCheck]:
        from pipeline.extensions.tasks.checks import check_tasks

        return [check_tasks] if stage == "every stage" else []

    def observers(self, trainer: Trainer) -> Sequence[Observer]:
        from pipeline.extensions.tasks.observer import TaskScores

        return [TaskScores(trainer)] if trainer.config.validation.tasks else []

    def evaluators(self) -> Mapping[str, str]:
        return {"tasks": "pipeline.extensions.tasks.evaluator:TASKS"}


EXTENSION = Tasks()
