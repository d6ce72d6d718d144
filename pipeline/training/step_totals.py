"""The totals of an optimizer step: the sums of its micro-batches, over all ranks."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.data.dataset.packing import IGNORED
from pipeline.model.chunked_loss import Losses
from pipeline.parallel.ranks import summed
from pipeline.training.batches import MicroBatch
from pipeline.training.engine import Engine


class StepTotals(NamedTuple):
    """A step over all ranks.

    Attributes:
        nll_per_token: the mean over the tokens that train by next-token prediction; None if the
            step has none, as a small batch of self-generated text alone.
        kl_per_token: the mean KL(base || model) over the tokens that train by it; None if the step
            has none.
        preserved_fraction: the share of all these tokens that took Route's preserved path; None
            for other methods.
        stop: whether any rank was asked to stop.
        gradient_norm: rank 0's global norm before clipping. Every decision is made from this
            number, because the ranks' own may differ in the last bits.
        applied: whether the weights changed.
    """

    nll_per_token: float | None
    kl_per_token: float | None
    preserved_fraction: float | None
    stop: bool
    gradient_norm: float
    applied: bool

    def figures(self) -> dict[str, float]:
        """The totals that are known, by their names in metrics.jsonl."""
        figures: dict[str, float] = {}
        if self.nll_per_token is not None:
            figures["loss"] = self.nll_per_token
        figures["gradient_norm"] = self.gradient_norm
        if self.kl_per_token is not None:
            figures["kl"] = self.kl_per_token
        if self.preserved_fraction is not None:
            figures["preserved_fraction"] = self.preserved_fraction
        return figures


class _Sum(IntEnum):
    """The places of the sums in their message."""

    NLL = 0
    NLL_TOKENS = 1
    KL = 2
    KL_TOKENS = 3
    PRESERVED = 4
    STOPS = 5
    GRADIENT_NORM = 6
    APPLIED = 7


class StepSums:
    """Adds up a step's micro-batches on the device.

    One all-reduce and one wait for the device bring all ranks' sums together.
    """

    def __init__(self, device: torch.device) -> None:
        # In fp64: the counts are exact, and a sum of millions of losses loses no digits.
        self._sums = torch.zeros(len(_Sum), dtype=torch.float64, device=device)

    def add(self, losses: Losses, batch: MicroBatch) -> None:
        """Adds a micro-batch. Its first `kl_sequences` sequences train by KL, the others do not."""
        is_predicted = batch.targets != IGNORED
        self._sums[_Sum.NLL] += losses.nll.sum()
        self._sums[_Sum.NLL_TOKENS] += is_predicted[batch.kl_sequences :].sum()
        self._sums[_Sum.KL] += losses.kl.sum()
        self._sums[_Sum.KL_TOKENS] += is_predicted[: batch.kl_sequences].sum()
        self._sums[_Sum.PRESERVED] += (losses.preserved & is_predicted).sum()

    def over_all_ranks(self, engine: Engine, *, stop: bool) -> StepTotals:
        """The step's totals; every rank must call it, and all get the same result."""
        if engine.tensor_parallel.rank != 0:
            # Tensor-parallel neighbours read the same tokens: each token counts once.
            self._sums.zero_()
        self._sums[_Sum.STOPS] = float(stop)
        if dist.get_rank() == 0:
            self._sums[_Sum.GRADIENT_NORM] = engine.gradient_norm
            self._sums[_Sum.APPLIED] = engine.step_applied
        # Of all ranks of the world, once a step. The norm and the flag are non-zero on rank 0 only,
        # so their sum is rank 0's value: a broadcast in the same message.
        sums = summed(self._sums).tolist()
        nll, nll_tokens, kl, kl_tokens, preserved, stops, gradient_norm, applied = sums
        nll_per_token = nll / nll_tokens if nll_tokens > 0 else None
        kl_per_token = kl / kl_tokens if kl_tokens > 0 else None
        preserved_fraction = None
        if engine.routed:
            preserved_fraction = preserved / max(1.0, nll_tokens + kl_tokens)
        return StepTotals(
            nll_per_token=nll_per_token,
            kl_per_token=kl_per_token,
            preserved_fraction=preserved_fraction,
            stop=stops > 0,
            gradient_norm=gradient_norm,
            applied=applied > 0,
        )
