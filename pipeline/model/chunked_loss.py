"""The loss of a batch, computed for a chunk of tokens at a time, so that the logits [N, V] never
exist at once.

The forward pass computes each chunk's gradients with respect to the hidden states and to the
output's weights right after its logits. The backward pass only scales them. For a chunk of n
tokens, with G [n, V] the gradient with respect to the logits z = W_out x + W_out^up x_up:

    gradient of x      G W_out               gradient of W_out      Gᵀ x       summed over chunks
    gradient of x_up   G W_out^up            gradient of W_out^up   Gᵀ x_up    summed over chunks
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipeline.model.hidden_states import HiddenStates
from pipeline.open_tokens import OpenTokens
from pipeline.parallel import fused_cross_entropy
from pipeline.parallel.cross_entropy import (
    IGNORED,
    greedy_choices_,
    kl_and_logit_gradient_,
    nll_and_logit_gradient_,
)
from pipeline.parallel.fused_cross_entropy import LogitParts
from pipeline.scale.router import gradients_of_paths

if TYPE_CHECKING:  # it imports this module
    from pipeline.model.output import OutputProjection


SUMS_16_BITS_IN_FP32 = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether torch multiplies 16 bits into an fp32 sum."""


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
class Projected:
    """The logits of n tokens, and what they were computed from.

    Attributes:
        logits: [n, columns], this rank's columns, in fp32, or to be summed.
        weight: [columns of the base's vocabulary, D], the matrix that multiplied x.
        x, x_up: [n, D] and [n, U], the streams that the weights multiplied; Route mixes its two
            paths' before.
        preserved: bool [n], which tokens took Route's preserved path; None for other models.
        logits_of_x_up: what `logits` still lack, both as the products gave them; None: nothing.
    """

    logits: Tensor
    weight: Tensor
    x: Tensor
    x_up: Tensor | None
    preserved: Tensor | None = None
    logits_of_x_up: Tensor | None = None


@dataclass
class LossInputs:
    """The differentiable inputs of the loss, or their gradients. None: there is none, or it needs
    no gradient.

    Attributes:
        x, x_up, preserved_x, preserved_x_up: the fields of `HiddenStates`.
        base: W_out, [V / tp_size, D].
        expansion: W_out^up, [V / tp_size, U].
        new_rows: the rows of new tokens, [n / tp_size, D + U].
        own_rows: the differences of W_out's rows for open tokens, [r, D].
    """

    x: Tensor | None
    x_up: Tensor | None
    preserved_x: Tensor | None
    preserved_x_up: Tensor | None
    base: Tensor | None
    expansion: Tensor | None
    new_rows: Tensor | None
    own_rows: Tensor | None = None

    def hidden_states(self, open_tokens: OpenTokens) -> HiddenStates:
        """The hidden states among them."""
        assert self.x is not None, "every model has a base stream"
        return HiddenStates(
            x=self.x,
            x_up=self.x_up,
            preserved_x=self.preserved_x,
            preserved_x_up=self.preserved_x_up,
            open_tokens=open_tokens,
        )

    def in_order(self) -> list[Tensor | None]:
        """The tensors in the order of the fields, in which autograd takes and returns them."""
        return [getattr(self, field.name) for field in fields(self)]


WEIGHTS = ("base", "expansion", "new_rows", "own_rows")
"""The fields of `LossInputs` that are weights."""


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


# --- What a chunk of logits adds to the gradients ---


def empty_gradients(inputs: LossInputs, needed: tuple[bool, ...]) -> LossInputs:
    """Zeros for each of `inputs` that needs a gradient."""
    gradients: list[Tensor | None] = []
    for field, tensor, is_needed in zip(fields(inputs), inputs.in_order(), needed, strict=True):
        if tensor is None or not is_needed:
            gradients.append(None)
        elif field.name in WEIGHTS:
            # Summed over chunks, in fp32: a sum in 16 bits would lose small terms.
            gradients.append(torch.zeros_like(tensor, dtype=torch.float32))
        else:
            # Each row is written once.
            gradients.append(torch.zeros_like(tensor))
    return LossInputs(*gradients)


def add_gradients(
    gradients: LossInputs,
    inputs: LossInputs,
    rows: slice,
    projected: Projected,
    logit_gradient: Tensor,
) -> None:
    """Adds one chunk's part to `gradients`, but for that of own rows; logit_gradient: [n, columns]
    in the type of the weights."""
    assert inputs.base is not None
    # This rank's columns are those of the base's vocabulary, then those of new tokens, if there are
    # any.
    of_base = logit_gradient[:, : len(inputs.base)]
    of_new = logit_gradient[:, len(inputs.base) :]
    width = inputs.base.shape[1]

    if gradients.base is not None:
        add_product_(gradients.base, of_base.T, projected.x)
    if gradients.expansion is not None:
        assert projected.x_up is not None
        add_product_(gradients.expansion, of_base.T, projected.x_up)
    if gradients.new_rows is not None:
        streams = projected.x
        if projected.x_up is not None:
            streams = torch.cat([projected.x, projected.x_up], dim=1)
        add_product_(gradients.new_rows, of_new.T, streams)

    of_x: Tensor | None = None
    if gradients.x is not None:
        of_x = of_base @ projected.weight
        if inputs.new_rows is not None:
            of_x += of_new @ inputs.new_rows[:, :width]
    of_x_up: Tensor | None = None
    if inputs.expansion is not None and projected.x_up is not None:
        of_x_up = of_base @ inputs.expansion
        if inputs.new_rows is not None:
            of_x_up += of_new @ inputs.new_rows[:, width:]

    if projected.preserved is None:
        _set_rows(gradients.x, rows, of_x)
        _set_rows(gradients.x_up, rows, of_x_up)
        return
    of_paths = gradients_of_paths(of_x, of_x_up, projected.preserved)
    _set_rows(gradients.x, rows, of_paths.x)
    _set_rows(gradients.x_up, rows, of_paths.x_up)
    _set_rows(gradients.preserved_x, rows, of_paths.preserved_x)
    _set_rows(gradients.preserved_x_up, rows, of_paths.preserved_x_up)


def _set_rows(gradient: Tensor | None, rows: slice, values: Tensor | None) -> None:
    if gradient is not None and values is not None:
        gradient[rows] = values


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [m, k] in fp32 += left [m, n] right [n, k]."""
    # On a GPU the product is summed where it is computed: apart, it would be rounded to 16 bits,
    # written, and read again. The kernels of CPUs have no such sum.
    if total.device.type != "cpu" and left.dtype.itemsize == 2 and SUMS_16_BITS_IN_FP32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
