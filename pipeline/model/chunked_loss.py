"""The loss of a batch, computed for a chunk of tokens at a time, so that the logits [N, V] never
exist at once.

The forward pass computes each chunk's gradients with respect to the hidden states and to the
output's weights right after its logits. The backward pass only scales them. For a chunk of n
tokens, with G [n, V] the gradient with respect to the logits z = W_out x + W_out^up x_up:

    gradient of x      G W_out               gradient of W_out      Gᵀ x       summed over chunks
    gradient of x_up   G W_out^up            gradient of W_out^up   Gᵀ x_up    summed over chunks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipeline.model.hidden_states import HiddenStates
from pipeline.model.loss_gradients import (
    LossInputs,
    Projected,
    add_gradients,
    empty_gradients,
)
from pipeline.open_tokens import OpenTokens
from pipeline.parallel import fused_cross_entropy
from pipeline.parallel.cross_entropy import (
    IGNORED,
    greedy_choices_,
    kl_and_logit_gradient_,
    nll_and_logit_gradient_,
)
from pipeline.parallel.fused_cross_entropy import LogitParts

if TYPE_CHECKING:  # it imports this module
    from pipeline.model.output import OutputProjection


class Losses(NamedTuple):
    """The losses of N targets, [N] or [B, S].

    Attributes:
        total: a scalar to differentiate: the summed nll; the summed kl times its coefficient; and,
            where routers of a mixture train, the loss that balances experts times its coefficient.
        nll: each target's negative log likelihood, fp32; zero where nothing is predicted, or kl is
            measured instead.
        kl: KL(base || model) at each token of self-generated text, in nats, fp32; zero elsewhere.
        preserved: bool; which tokens took Route's preserved path.
        is_greedy_choice: bool; whether greedy decoding chooses the target. None while gradients are
            computed, to save time.
    """

    total: Tensor
    nll: Tensor
    kl: Tensor
    preserved: Tensor
    is_greedy_choice: Tensor | None

    def reshaped(self, shape: torch.Size) -> Losses:
        """The same losses, those of single targets reshaped to `shape`."""
        is_greedy_choice = self.is_greedy_choice
        if is_greedy_choice is not None:
            is_greedy_choice = is_greedy_choice.view(shape)
        return Losses(
            total=self.total,
            nll=self.nll.view(shape),
            kl=self.kl.view(shape),
            preserved=self.preserved.view(shape),
            is_greedy_choice=is_greedy_choice,
        )


@dataclass(frozen=True)
class LossSettings:
    """What else the loss depends on; nothing of it gets a gradient.

    Attributes:
        projection: computes the logits.
        targets: [N], IGNORED where nothing is predicted.
        reference: [K, D], the base's hidden states for the first K tokens, whose loss is KL(base ||
            model).
        open_tokens: the field of `HiddenStates`.
    """

    projection: OutputProjection
    targets: Tensor
    reference: Tensor | None
    open_tokens: OpenTokens


def chunked_loss(
    projection: OutputProjection, hidden: HiddenStates, targets: Tensor, kl_tokens: int
) -> Losses:
    """The losses of N targets, of which the first `kl_tokens` train by KL.

    A collective over the tensor-parallel group: all its ranks call it together.
    """
    reference = None if hidden.reference is None else hidden.reference[:kl_tokens]
    settings = LossSettings(projection, targets, reference, hidden.open_tokens)
    inputs = LossInputs(
        x=hidden.x,
        x_up=hidden.x_up,
        preserved_x=hidden.preserved_x,
        preserved_x_up=hidden.preserved_x_up,
        base=projection.base,
        expansion=projection.expansion,
        new_rows=projection.new_rows,
        own_rows=projection.own_rows_of_all_ranks(),
    )
    tensors = inputs.in_order()
    if not torch.is_grad_enabled():
        # `needs_input_grad` is true for parameters even under no_grad: unused gradients would be
        # computed.
        tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
    return Losses(*_ChunkedLoss.apply(settings, *tensors))


class _ChunkedLoss(torch.autograd.Function):
    """`chunked_loss` for autograd, which takes and returns tensors by position: those of
    `LossInputs`."""

    @staticmethod
    def forward(
        ctx: Any, settings: LossSettings, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        inputs = LossInputs(*tensors)
        gradients = empty_gradients(inputs, needed=ctx.needs_input_grad[1:])
        losses = sum_over_chunks(settings, inputs, gradients)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(losses.nll, losses.kl, losses.preserved)
        return losses.total, losses.nll, losses.kl, losses.preserved, losses.is_greedy_choice

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled: list[Tensor | None] = [None]  # of the settings
        for gradient in ctx.gradients.in_order():
            scaled.append(None if gradient is None else gradient * scale)
        return tuple(scaled)


def sum_over_chunks(settings: LossSettings, inputs: LossInputs, gradients: LossInputs) -> Losses:
    """The losses, chunk by chunk; adds each chunk's part to `gradients`."""
    assert inputs.base is not None, "every model has W_out"
    projection = settings.projection
    targets = settings.targets
    hidden = inputs.hidden_states(settings.open_tokens)
    kl_tokens = 0 if settings.reference is None else len(settings.reference)
    trains = any(gradient is not None for gradient in gradients.in_order())
    columns = projection.vocabulary.range
    target_columns = projection.vocabulary.columns_of(targets)

    open_weight: Tensor | None = None
    if trains and inputs.own_rows is not None:
        assert settings.open_tokens.closed is None, "training has no gate: every token is open"
        open_weight = projection.open_weight()

    # A GPU's host never waits here: which chunk has which loss is known from its rows.
    nll = torch.zeros(len(targets), dtype=torch.float32, device=targets.device)
    kl = torch.zeros_like(nll)
    preserved = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    is_greedy_choice = None if trains else torch.empty_like(preserved)

    compiled = trains and projection.compiles_loss
    for rows in projection.chunks(len(targets), kl_tokens):
        # The chunk's logits live until the end of this iteration; nothing of them is saved.
        projected = projection.project(hidden.rows(rows), open_weight, summed=not compiled)
        if projected.preserved is not None:
            preserved[rows] = projected.preserved
        if is_greedy_choice is not None:
            greedy = greedy_choices_(projected.logits, **columns)
            is_greedy_choice[rows] = greedy == target_columns[rows]

        trains_by_kl = rows.start < kl_tokens
        loss = kl if trains_by_kl else nll
        if compiled:
            loss[rows], logit_gradient = _compiled_loss(settings, projected, rows, trains_by_kl)
        else:
            loss[rows], logit_gradient = _loss_by_operations_(
                settings, projected.logits, rows, trains_by_kl, trains
            )
        if trains:
            logit_gradient = logit_gradient.to(inputs.base.dtype)
            add_gradients(gradients, inputs, rows, projected, logit_gradient)
            if gradients.own_rows is not None:
                of_base = logit_gradient[:, : len(inputs.base)]
                projection.add_gradient_of_own_rows_(gradients.own_rows, of_base, projected.x)

    total = nll.sum()
    if settings.reference is not None:
        total = total + projection.kl_coefficient * kl.sum()
    return Losses(total, nll, kl, preserved, is_greedy_choice)


def _compiled_loss(
    settings: LossSettings, projected: Projected, rows: slice, trains_by_kl: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each token of a chunk, and its gradient with respect to the logits before they
    were capped, in the type of the weights."""
    projection = settings.projection
    targets = settings.targets[rows]
    dtype = projected.weight.dtype
    columns = projection.vocabulary.range
    logits = LogitParts(
        projected.logits, projected.logits_of_x_up, projection.softcap, projection.logit_factor
    )
    if not trains_by_kl:
        return fused_cross_entropy.nll_and_logit_gradient(
            logits, projection.vocabulary.columns_of(targets), dtype, **columns
        )
    assert settings.reference is not None
    return fused_cross_entropy.kl_and_logit_gradient(
        logits._replace(factor=projection.logit_factor * projection.kl_coefficient),
        projection.reference_logits(settings.reference[rows]),
        targets == IGNORED,
        dtype,
        **columns,
    )


def _loss_by_operations_(
    settings: LossSettings, logits: Tensor, rows: slice, trains_by_kl: bool, trains: bool
) -> tuple[Tensor, Tensor]:
    """The same by single operations, which overwrite the logits with their gradient, in fp32."""
    projection = settings.projection
    targets = settings.targets[rows]
    columns = projection.vocabulary.range
    slopes = projection.slopes(logits) if trains else None
    if trains_by_kl:
        assert settings.reference is not None
        loss, gradient = kl_and_logit_gradient_(
            logits,
            projection.reference_logits(settings.reference[rows]),
            ignored=targets == IGNORED,
            **columns,
        )
        gradient *= projection.kl_coefficient
    else:
        loss, gradient = nll_and_logit_gradient_(
            logits, projection.vocabulary.columns_of(targets), **columns
        )
    if slopes is not None:
        gradient *= slopes
    return loss, gradient
