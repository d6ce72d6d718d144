"""How far the logits of two models differ on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pipeline.conversion.probe_texts import Probe
from pipeline.model.output import perplexity
from pipeline.scale_math import NEVER


@dataclass(frozen=True)
class LogitDifference:
    """The difference of two models' logits.

    Attributes:
        max_abs: the largest absolute difference of a logit.
        kl: the mean Kullback-Leibler divergence, in nats a token.
    """

    max_abs: float = 0.0
    kl: float = 0.0


@dataclass(frozen=True)
class Comparison(LogitDifference):
    """The comparison of two models on one text.

    Attributes:
        tokens: the number of tokens.
        top1_agreement: the share of tokens after which both rank the same token first.
        training_perplexity: of the trained model.
        exported_perplexity: of the export.
    """

    tokens: int = 0
    top1_agreement: float = 1.0
    training_perplexity: float = math.nan
    exported_perplexity: float = math.nan


def compare_texts(
    probe: Probe, trained: Sequence[Tensor], exported: Sequence[Tensor]
) -> dict[str, Comparison]:
    """The comparison on each text.

    trained, exported: the logits [S, V] of all windows, in the order of the probe.
    """
    comparisons: dict[str, Comparison] = {}
    first = 0
    for name, windows in probe.items():
        stop = first + len(windows)
        comparisons[name] = compare(windows, trained[first:stop], exported[first:stop])
        first = stop
    return comparisons


def compare(
    windows: Sequence[Tensor], trained: Sequence[Tensor], exported: Sequence[Tensor]
) -> Comparison:
    """The comparison of two models on the windows of one text.

    Perplexities leave out new tokens after a closed token, whose probability is zero.

    Args:
        windows: the tokens of each window, [S].
        trained: the logits of the trained model on each window, [S, V].
        exported: likewise of the export.
    """
    tokens = 0
    targets = 0
    max_abs = 0.0
    agreed = 0
    divergence = 0.0
    nll_trained = 0.0
    nll_exported = 0.0
    for window, z_trained, z_exported in zip(windows, trained, exported, strict=True):
        tokens += len(window)
        difference = float((z_trained.float() - z_exported.float()).abs().max())
        if math.isnan(difference):
            # max() would pass over a NaN, which compares as neither larger nor smaller.
            difference = math.inf
        max_abs = max(max_abs, difference)
        agreed += int((z_trained.argmax(-1) == z_exported.argmax(-1)).sum())
        # In fp64: KL sums differences of nearly equal numbers over the vocabulary.
        p = F.log_softmax(z_trained.double(), dim=-1)
        q = F.log_softmax(z_exported.double(), dim=-1)
        divergence += float((p.exp() * (p - q)).sum())
        # The logits at a token predict the next one, so that the last logits have no target.
        following = window[1:]
        is_possible = p[:-1].gather(1, following[:, None])[:, 0] > NEVER / 2
        targets += int(is_possible.sum())
        nll_trained += float(F.nll_loss(p[:-1], following, reduction="none")[is_possible].sum())
        nll_exported += float(F.nll_loss(q[:-1], following, reduction="none")[is_possible].sum())
    if math.isnan(divergence):
        divergence = math.inf
    return Comparison(
        max_abs=max_abs,
        kl=divergence / tokens,
        tokens=tokens,
        top1_agreement=agreed / tokens,
        training_perplexity=perplexity(nll_trained / max(1, targets)),
        exported_perplexity=perplexity(nll_exported / max(1, targets)),
    )


def worst_of(texts: Mapping[str, Comparison]) -> LogitDifference:
    """The largest of each figure over all texts."""
    max_abs = max(text.max_abs for text in texts.values())
    kl = max(text.kl for text in texts.values())
    return LogitDifference(max_abs, kl)
