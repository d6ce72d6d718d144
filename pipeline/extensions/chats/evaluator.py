"""`scale-cpt evaluate --chats`: greedy answers of Hugging Face folders, and of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import add_chat_date_option, positive
from pipeline.config.run import RunConfig
from pipeline.evaluation.evaluator import Evaluator, RunEvaluation

if TYPE_CHECKING:
    from pipeline.extensions.chats.score import Chat, ChatScore


class ChatEvaluator(Evaluator):
    help = "chats in JSONL; the last of `messages` is the reference answer"
    title = "chats"
    scores_runs = True

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        add_chat_date_option(group)
        group.add_argument(
            "--max-answer-tokens",
            type=positive,
            default=256,
            help="tokens after which an answer is cut (default: 256)",
        )

    def scores(self, arguments: argparse.Namespace) -> Mapping[str, Mapping[str, ChatScore]]:
        from pipeline.data.tokenizer.chats import ChatTemplate
        from pipeline.extensions.chats.score import read_chats, score_chats

        chats = read_chats(arguments.chats)
        # A template that cannot be read is found before the other models have answered.
        for model in arguments.model:
            ChatTemplate(model)
        scores: dict[str, Mapping[str, ChatScore]] = {}
        for model in arguments.model:
            scores[str(model)] = score_chats(
                model,
                chats,
                max_answer_tokens=arguments.max_answer_tokens,
                trust_remote_code=arguments.trust_remote_code,
                chat_date=arguments.chat_date,
            )
        return scores

    def table(self, scores: Mapping[str, Mapping[str, ChatScore]]) -> str:
        from pipeline.evaluation.table import table
        from pipeline.extensions.chats.score import chat_rows

        return table(*chat_rows(scores))

    def run_evaluation(self, config: RunConfig, arguments: argparse.Namespace) -> RunEvaluation:
        return RunChats(config, arguments.chats, max_answer_tokens=arguments.max_answer_tokens)


class RunChats(RunEvaluation):
    """Chats that a run's base and export answer.

    Args:
        config: the run.
        files: the files of chats.
        max_answer_tokens: the longest answer.
    """

    title = "Chats"
    scored = "greedy answers"

    def __init__(self, config: RunConfig, files: Sequence[str], *, max_answer_tokens: int) -> None:
        self._config = config
        self._files = files
        self._max_answer_tokens = max_answer_tokens
        self._chats: Mapping[str, Sequence[Chat]] = {}

    def read(self) -> None:
        from pipeline.extensions.chats.score import read_chats

        self._chats = read_chats(self._files)

    def scores(self, folder: Path) -> Mapping[str, ChatScore]:
        from pipeline.extensions.chats.score import score_chats

        return score_chats(
            folder,
            self._chats,
            max_answer_tokens=self._max_answer_tokens,
            chat_date=self._config.data.chat_date,
        )

    def rows(
        self, scores: Mapping[str, Mapping[str, ChatScore]]
    ) -> tuple[list[str], list[list[str]]]:
        from pipeline.extensions.chats.score import chat_rows

        return chat_rows(scores)


CHATS = ChatEvaluator()
