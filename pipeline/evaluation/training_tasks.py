"""lm-eval's tasks for a model in training, which scores its questions itself.

`scale-cpt evaluate` asks an exported model. Here lm-eval only makes the questions and counts the
answers; the tokens are scored by the ranks that train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.benchmarks import Tasks, load_tasks

Question = tuple[list[int], list[int]]
"""The ids of a context, at least one, and of what may follow it."""
Answer = tuple[float, bool]
"""The log likelihood of what follows, and whether it is the likeliest."""
_SCORED = ("multiple_choice", "loglikelihood")
"""lm-eval's kinds of tasks that need no written answers."""


def load_training_tasks(config: RunConfig) -> Tasks:
    """The tasks of `validation.tasks`.

    Raises:
        MissingPackageError: lm-eval is not installed.
        ConfigError: there is no such task, or it takes written answers.
        DataError: the documents of a task are missing.
    """
    settings = config.validation
    tasks = load_tasks(
        settings.tasks,
        include=settings.tasks_folder,
        few_shot=settings.few_shot,
        limit=settings.tasks_limit,
        setting="validation.tasks",
    )
    for name, task in tasks.loaded["tasks"].items():
        if task.OUTPUT_TYPE not in _SCORED:
            raise ConfigError(
                f"validation.tasks {name}: expected a task with choices, found one that takes "
                f"written answers ({task.OUTPUT_TYPE}); ask the export (scale-cpt evaluate --tasks)"
            )
    return tasks


def task_model(
    tokenizer: Tokenizer, score: Callable[[Sequence[Question]], list[Answer]], max_length: int
) -> Any:
    """lm-eval's model whose questions `score` answers.

    Every question follows what a document follows in training, as in `benchmark_model`. Of a longer
    one the last `max_length` tokens are read. A question raises DataError if an answer has no
    token.
    """
    # Here: the package is optional, and takes seconds to import.
    from lm_eval.api.model import TemplateLM

    before = list(tokenizer.before_document)

    class TrainingModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
        @property
        def eot_token_id(self) -> int:
            return before[-1]

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            ids = ids_of(tokenizer, string, control=True)
            return ids if add_special_tokens is False else [*before, *ids]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[Answer]:
            # Its bars would tear ours.
            answers: list[Answer] = super().loglikelihood(requests, disable_tqdm=True)
            return answers

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[Answer]:
            questions: list[Question] = []
            for _, context, continuation in requests:
                if not continuation:
                    raise DataError(
                        "validation.tasks: expected an answer of at least one token, found an "
                        f"empty one after the tokens {context[-8:]}; leave that task out"
                    )
                read = [*context, *continuation][-max_length:]
                # Of what may follow at least one token is predicted from another.
                following = min(len(continuation), len(read) - 1)
                questions.append((read[:-following], read[-following:]))
            return score(questions)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError("checked: no task scores whole texts")

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError("checked: no task takes written answers")

    return TrainingModel()
