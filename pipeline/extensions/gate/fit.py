"""Logistic regression on features, and how well its scores separate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import DataError

_RIDGE = 1e-4
"""L2 penalty on the weights: without it, separable text would have no finite solution."""
_ITERATIONS = 200


def standardisation(features: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and standard deviation of each feature: features [N, F] -> [F], [F].

    A constant feature gets the standard deviation 1.
    """
    # Of the population: features are a fixed set, and one token must not give NaN.
    std, mean = torch.std_mean(features, dim=0, correction=0)
    return mean, torch.where(std > 1e-6, std, 1.0)


def fit_logistic(features: Tensor, is_new: Tensor) -> tuple[Tensor, float]:
    """Logistic regression: the weights [F] and the bias of the log odds that a token is new.

    Both classes count the same, whatever their sizes. The problem is convex, and L-BFGS starts at
    zero, so the result depends on nothing else.

    Args:
        features: [N, F], standardised, fp32.
        is_new: bool [N].

    Raises:
        DataError: one of the classes is empty.
    """
    count = len(is_new)
    positives = int(is_new.sum())
    if positives in (0, count):
        raise DataError(
            "gate: expected tokens of new text and of text that is not new, found one kind only"
        )
    # The weights of each class sum to one half, so that the larger class does not dominate.
    weights = torch.where(is_new, 0.5 / positives, 0.5 / (count - positives)).to(features)
    targets = is_new.to(features)
    # At zero every token is as likely new as not: no seed enters the result.
    weight = features.new_zeros(features.shape[1], requires_grad=True)
    bias = features.new_zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=_ITERATIONS,
        history_size=20,
        # Strong Wolfe conditions keep L-BFGS's curvature estimate positive, and need no learning
        # rate.
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = features @ weight + bias
        # From logits: the sigmoid of a large score rounds to 1, whose logarithm has no gradient.
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        total = (weights * losses).sum() + _RIDGE / 2 * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach().cpu(), float(bias.detach())


def area_under_roc(positives: Tensor, negatives: Tensor) -> float:
    """The share of pairs of a positive and a negative in which the positive scores higher.

    Ties count half. positives: scores [N]; negatives: scores [M].
    """
    ordered = negatives.sort().values
    # By ranks, in N log M; all pairs would be N x M comparisons.
    below = torch.searchsorted(ordered, positives, right=False).double()
    not_above = torch.searchsorted(ordered, positives, right=True).double()
    return float(((below + not_above) / 2).mean() / len(negatives))
