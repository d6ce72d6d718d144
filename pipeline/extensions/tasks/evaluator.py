"""`scale-cpt evaluate --tasks`: lm-eval's tasks on Hugging Face folders."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import positive, whole_number
from pipeline.evaluation.evaluator import Evaluator

if TYPE_CHECKING:
    from pipeline.extensions.tasks.benchmarks import Result


class TaskEvaluator(Evaluator):
    help = "benchmarks of lm-eval, such as kobest_boolq kobest_copa arc_easy blimp"
    after = "--model"
    title = "benchmarks"

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument(
            "--include-path",
            type=Path,
            metavar="DIR",
            help="a folder of your own lm-eval tasks; RUNS the Python code that they name",
        )
        group.add_argument(
            "--few-shot",
            type=whole_number(0, 64),
            metavar="N",
            help="solved examples before each question",
        )
        group.add_argument(
            "--limit",
            type=positive,
            help="ask only the first questions of each task, at most this many",
        )
        group.add_argument(
            "--batch-size", type=positive, default=16, help="answers scored at a time (default: 16)"
        )
        group.add_argument(
            "--chat-template",
            action="store_true",
            help="ask as a user does, framed by the tokenizer's chat template",
        )

    def scores(self, arguments: argparse.Namespace) -> Mapping[str, Sequence[Result]]:
        from pipeline.extensions.tasks.benchmarks import benchmark_model, load_tasks, task_results

        tasks = load_tasks(
            arguments.tasks,
            include=arguments.include_path,
            few_shot=arguments.few_shot,
            limit=arguments.limit,
        )
        results: dict[str, Sequence[Result]] = {}
        for model in arguments.model:
            loaded = benchmark_model(
                model,
                batch_size=arguments.batch_size,
                prefix=arguments.prefix,
                trust_remote_code=arguments.trust_remote_code,
                chat_template=arguments.chat_template,
            )
            results[str(model)] = task_results(loaded, tasks, chat_template=arguments.chat_template)
        return results

    def table(self, scores: Mapping[str, Sequence[Result]]) -> str:
        from pipeline.extensions.tasks.benchmarks import comparison

        return comparison(scores)


TASKS = TaskEvaluator()
