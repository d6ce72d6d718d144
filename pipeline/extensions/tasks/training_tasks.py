"""lm-eval's tasks for a model in training.

lm-eval makes the questions and counts the right answers. The ranks that train score the tokens:
no export is needed, as `scale-cpt evaluate` needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.errors import ConfigError, DataError
from pipeline.extensions.tasks.benchmarks import Tasks, load_tasks

Question = tuple[list[int], list[int]]
"""The ids of a context, at least one, and the ids of a continuation."""
Answer = tuple[float, bool]
"""The log likelihood of the continuation, and whether each of its tokens is the likeliest one."""
_SCORED = ("multiple_choice", "loglikelihood")
"""lm-eval's kinds of tasks that need no written answers."""
_WRITTEN = "generate_until"
"""lm-eval's kind of tasks that take written answers."""


@dataclass(frozen=True)
class WrittenQuestion:
    """A question that is answered with a text.

    Attributes:
        prompt: the ids of the question, at least one.
        new_tokens: the most tokens of an answer.
        ends: texts that end an answer.
    """

    prompt: list[int]
    new_tokens: int
    ends: list[str]


def load_training_tasks(config: RunConfig) -> Tasks:
    """The tasks of `validation.tasks`.

    Raises:
        MissingPackageError: lm-eval is not installed.
        ConfigError: there is no such task, or the model in training cannot answer it.
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
        if task.OUTPUT_TYPE == _WRITTEN:
            options = task.get_config("generation_kwargs")
            _check_written(name, options or {}, config.data.sequence_length)
        elif task.OUTPUT_TYPE not in _SCORED:
            raise ConfigError(
                f"validation.tasks {name}: expected a task with choices or written answers, found "
                f"one of whole texts ({task.OUTPUT_TYPE}); ask the export (scale-cpt evaluate "
                "--tasks)"
            )
    return tasks


def _check_written(name: str, options: dict[str, Any], sequence_length: int) -> None:
    """Checks that the model in training can write a task's answers.

    Raises:
        ConfigError: they are drawn at random, or leave no space for the question.
    """
    asked = _generation_options(options)
    if asked["do_sample"]:
        raise ConfigError(
            f"validation.tasks {name}: expected greedy answers, found answers that are drawn at "
            "random (do_sample); ask the export (scale-cpt evaluate --tasks)"
        )
    if asked["max_gen_toks"] >= sequence_length:
        raise ConfigError(
            f"validation.tasks {name}: its answers have up to {asked['max_gen_toks']} tokens, "
            f"which with the question do not fit data.sequence_length {sequence_length}; ask the "
            "export (scale-cpt evaluate --tasks)"
        )


def _generation_options(options: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's options of a written answer, with its defaults where a task leaves them out."""
    from lm_eval.models.utils import normalize_gen_kwargs

    return dict(normalize_gen_kwargs(options))


def task_model(
    tokenizer: Tokenizer,
    score: Callable[[Sequence[Question]], list[Answer]],
    write: Callable[[Sequence[WrittenQuestion]], list[str]],
    max_length: int,
) -> Any:
    """A model for lm-eval that passes its questions to the ranks that train.

    Every question follows the tokens that precede a document in training, as in `benchmark_model`.
    Of a question and its answer the last `max_length` tokens are read. The model raises DataError
    for a question whose answer has no token.

    Args:
        tokenizer: the run's tokenizer.
        score: answers questions with choices.
        write: answers questions with a text.
        max_length: the most tokens that the model reads.
    """
    # Here: the package is optional, and takes seconds to import.
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import postprocess_generated_text

    before = list(tokenizer.before_document)

    class TrainingModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
        @property
        def eot_token_id(self) -> int:
            return before[-1]

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            ids = ids_of(tokenizer, string, control=True)
            if add_special_tokens is False:
                # The continuation of a context, which has the prefix.
                return ids
            return [*before, *ids]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[Answer]:
            # lm-eval's progress bars would break the lines of ours.
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
                # At least one token of context must be left, from which the first one is predicted.
                following = min(len(continuation), len(read) - 1)
                questions.append((read[:-following], read[-following:]))
            return score(questions)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError("checked: no task scores whole texts")

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            questions: list[WrittenQuestion] = []
            for request in requests:
                context, options = request.args
                asked = _generation_options(options)
                new_tokens = asked["max_gen_toks"]
                prompt = self.tok_encode(context)[new_tokens - max_length :]
                questions.append(WrittenQuestion(prompt, new_tokens, asked["until"]))
            answers: list[str] = []
            for question, text in zip(questions, write(questions), strict=True):
                answers.append(postprocess_generated_text(text, question.ends, None))
            return answers

    return TrainingModel()
