"""lm-eval's interface to a model in training, which scores continuations and generates nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor

from pipeline.data.packing import IGNORED
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import ConfigError

Scores = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Tokens and targets [B, S] on the CPU (IGNORED where nothing is predicted) -> the nll of each target, and whether it
is the most probable token: [B, S] each. B and S may differ from call to call; B is at most the batch size."""


class ScoringModel(TemplateLM):  # type: ignore[misc]
    """Answers lm-eval's questions by `scores`; every prompt follows what documents follow in training.

    Requests are sorted by length, which depends on them alone: ranks that share a model make the same calls.

    Raises:
        ConfigError: a task wants generated text or the likelihood of a whole document.
    """

    def __init__(self, scores: Scores, encoder: Tokenizer, *, context: int, batch_size: int) -> None:
        super().__init__()
        self._scores, self._encoder = scores, encoder
        self._context, self._batch_size = context, batch_size

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._encoder.document_end[-1]

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is."""
        return self._encoder.before_document[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ANN401
        """The ids of `string`, after what precedes a document unless `add_special_tokens` is False."""
        before = [] if add_special_tokens is False else self._encoder.before_document
        return [*before, *self._encoder.reference.encode([string]).ids.tolist()]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        **_: Any,  # noqa: ANN401
    ) -> list[tuple[float, bool]]:
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda index: (-lengths[index], index))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            width = min(max(lengths[index] for index in batch) - 1, self._context)
            tokens = torch.full((len(batch), width), self.eot_token_id)
            targets = torch.full_like(tokens, IGNORED)
            for row, index in enumerate(batch):
                question, answer = requests[index][1:]
                ids = torch.tensor((question + answer)[-width - 1 :])  # a question may lose its beginning
                tokens[row, : len(ids) - 1] = ids[:-1]
                scored = min(len(answer), len(ids) - 1)
                targets[row, len(ids) - 1 - scored : len(ids) - 1] = ids[len(ids) - scored :]
            nll, is_greedy = (found.cpu() for found in self._scores(tokens, targets))
            present = targets != IGNORED
            for row, number in enumerate(batch):
                of_answer = present[row]
                answers[number] = -float(nll[row][of_answer].double().sum()), bool(is_greedy[row][of_answer].all())
        return answers

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:  # noqa: ANN401
        """Refused: a sharded model in training generates nothing, and validation scores held-out text."""
        raise ConfigError("a model in training answers tasks of choices only; use scale-cpt evaluate for the others")

    loglikelihood_rolling = generate_until
