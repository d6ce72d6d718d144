"""How well answers are known: by their first token, and as a whole.

The model reads the true tokens before each one it is asked for. Where it would choose every token of an answer, and the
end of the document behind it, greedy decoding gives that answer, no less and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.data.packing import IGNORED
from pipeline.model.output import Losses


@dataclass(frozen=True)
class AnswerScore:
    """Means over answers.

    first_token_accuracy: how often the first token of the answer is the most probable one of all ("hard").
    first_token_probability: how probable it is ("soft").
    exact_match: how often greedy decoding gives the answer, and ends it.
    """

    first_token_accuracy: float
    first_token_probability: float
    exact_match: float


def answer_sums(losses: Losses, targets: Tensor, answer_starts: Tensor) -> Tensor:
    """Counts each sequence's answers: those there are, those whose first token is chosen, the probabilities of these
    tokens, and the answers chosen whole. targets, answer_starts: [B, S]; an answer that a sample cuts counts by what
    the sample has of it. Returns float64 [B, 4].
    """
    if losses.is_greedy_choice is None:
        raise ValueError("answers are scored where no gradient is computed")
    starts = answer_starts.double()
    probabilities = losses.nll.double().neg().exp()
    # Answers are numbered from 1 in each sequence; what comes before the first of them has no beginning here.
    answer = answer_starts.long().cumsum(dim=1)
    missed = (targets != IGNORED) & ~losses.is_greedy_choice
    misses = torch.zeros(len(targets), targets.shape[1] + 1, dtype=torch.float64, device=targets.device)
    misses.scatter_add_(1, answer, missed.double())
    whole = misses.gather(1, answer) == 0
    return torch.stack(
        [
            starts.sum(dim=1),
            (starts * losses.is_greedy_choice).sum(dim=1),
            (starts * probabilities).sum(dim=1),
            (starts * whole).sum(dim=1),
        ],
        dim=1,
    )


def answer_score(sums: list[float]) -> AnswerScore | None:
    """From the sums of all sequences; None where there is no answer."""
    answers, *counted = sums
    return AnswerScore(*(one / answers for one in counted)) if answers else None
