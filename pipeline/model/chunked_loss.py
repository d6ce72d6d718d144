"""The loss of a batch, computed for a chunk of tokens at a time, so that the logits [N, V] never
exist at once.

The forward pass computes each chunk's gradients with respect to the hidden states and to the
output's weights right after its logits. The backward pass only scales them. For a chunk of n
tokens, with G [n, V] the gradient with respect to the logits z = W_out x + W_out^up x_up:

    gradient of x      G W_out               gradient of W_out      Gᵀ x       summed over chunks
    gradient of x_up   G W_out^up            gradient of W_out^up   Gᵀ x_up    summed over chunks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.model.hidden_states import HiddenStates
from pipeline.model.new_tokens import LogitColumns
from pipeline.model.own_weights import OwnColumns, add_gradient_of_own_rows_
from pipeline.parallel.cross_entropy import (
    IGNORED,
    greedy_choices_,
    kl_and_logit_gradient_,
    nll_and_logit_gradient_,
)
from pipeline.scale.router import gradients_of_paths


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

    def of_shape(self, shape: torch.Size) -> Losses:
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
        logits: [n, columns] in fp32, this rank's columns.
        weight: [columns of the base's vocabulary, D], the matrix that multiplied x.
        x, x_up: [n, D] and [n, U], the streams that the weights multiplied; Route mixes its two
            paths' before.
        preserved: bool [n], which tokens took Route's preserved path; None for other models.
    """

    logits: Tensor
    weight: Tensor
    x: Tensor
    x_up: Tensor | None
    preserved: Tensor | None = None


class Projection(Protocol):
    """What the loss needs of the output projection: `pipeline.model.output.OutputProjection`."""

    vocabulary: LogitColumns
    kl_coefficient: float

    def own_columns(self) -> OwnColumns:
        """The own rows of this rank's columns of the base's vocabulary, if there are any."""

    def open_weight(self) -> Tensor | None:
        """The matrix [columns, D] of tokens that are all open; None without own rows."""

    def chunks(self, tokens: int, kl_tokens: int = 0) -> Iterator[slice]:
        """Runs of tokens of which none holds tokens on both sides of `kl_tokens`."""

    def project(self, hidden: HiddenStates, open_weight: Tensor | None = None) -> Projected:
        """The logits of some tokens; with `open_weight` of tokens that are all open."""

    def slopes(self, logits: Tensor) -> Tensor | None:
        """The derivatives of soft-capped logits with respect to what was capped; None without
        capping."""

    def reference_logits(self, x: Tensor) -> Tensor:
        """The base's own logits for its hidden states x: [n, D]."""


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
        closed: the field of `HiddenStates`.
    """

    projection: Projection
    targets: Tensor
    reference: Tensor | None
    closed: Tensor | None


def chunked_loss(settings: LossSettings, inputs: LossInputs) -> Losses:
    """The losses of N targets. A collective over the tensor-parallel group: all its ranks call it
    together."""
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


def sum_over_chunks(settings: LossSettings, inputs: LossInputs, gradients: LossInputs) -> Losses:
    """The losses, chunk by chunk; adds each chunk's part to `gradients`."""
    assert inputs.x is not None and inputs.base is not None, "every model has a base stream"
    projection = settings.projection
    targets = settings.targets
    hidden = HiddenStates(
        x=inputs.x,
        x_up=inputs.x_up,
        preserved_x=inputs.preserved_x,
        preserved_x_up=inputs.preserved_x_up,
        closed=settings.closed,
    )
    kl_tokens = 0 if settings.reference is None else len(settings.reference)
    trains = any(gradient is not None for gradient in gradients.in_order())
    columns = projection.vocabulary.range
    target_columns = projection.vocabulary.of_tokens(targets)

    own_columns: OwnColumns | None = None
    open_weight: Tensor | None = None
    if trains and inputs.own_rows is not None:
        assert settings.closed is None, "training has no gate: every token is open"
        own_columns = projection.own_columns()
        open_weight = projection.open_weight()

    # A GPU's host never waits here: which chunk has which loss is known from its rows.
    nll = torch.zeros(len(targets), dtype=torch.float32, device=targets.device)
    kl = torch.zeros_like(nll)
    preserved = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    is_greedy_choice = None if trains else torch.empty_like(preserved)

    for rows in projection.chunks(len(targets), kl_tokens):
        # The chunk's logits live until the end of this iteration; nothing of them is saved.
        projected = projection.project(hidden.rows(rows), open_weight)
        if projected.preserved is not None:
            preserved[rows] = projected.preserved
        if is_greedy_choice is not None:
            greedy = greedy_choices_(projected.logits, **columns)
            is_greedy_choice[rows] = greedy == target_columns[rows]

        # The losses below overwrite the logits with their gradient.
        slopes = projection.slopes(projected.logits) if trains else None
        if settings.reference is not None and rows.start < kl_tokens:
            kl[rows], logit_gradient = kl_and_logit_gradient_(
                projected.logits,
                projection.reference_logits(settings.reference[rows]),
                ignored=targets[rows] == IGNORED,
                **columns,
            )
            logit_gradient *= projection.kl_coefficient
        else:
            nll[rows], logit_gradient = nll_and_logit_gradient_(
                projected.logits, target_columns[rows], **columns
            )
        if slopes is not None:
            logit_gradient *= slopes
        if trains:
            logit_gradient = logit_gradient.to(inputs.base.dtype)
            add_gradients(gradients, inputs, rows, projected, logit_gradient, own_columns)

    total = nll.sum()
    if settings.reference is not None:
        total = total + projection.kl_coefficient * kl.sum()
    return Losses(total, nll, kl, preserved, is_greedy_choice)


def add_gradients(
    gradients: LossInputs,
    inputs: LossInputs,
    rows: slice,
    projected: Projected,
    logit_gradient: Tensor,
    own_columns: OwnColumns | None,
) -> None:
    """Adds one chunk's part to `gradients`; logit_gradient: [n, columns] in the type of the
    weights.

    `own_columns` says which own row each column of the base's vocabulary has, if there are any.
    """
    assert inputs.base is not None
    # This rank's columns are those of the base's vocabulary, then those of new tokens, if there are
    # any.
    of_base = logit_gradient[:, : len(inputs.base)]
    of_new = logit_gradient[:, len(inputs.base) :]
    width = inputs.base.shape[1]

    if gradients.base is not None:
        gradients.base += of_base.T @ projected.x
    if gradients.expansion is not None:
        assert projected.x_up is not None
        gradients.expansion += of_base.T @ projected.x_up
    if gradients.new_rows is not None:
        streams = projected.x
        if projected.x_up is not None:
            streams = torch.cat([projected.x, projected.x_up], dim=1)
        gradients.new_rows += of_new.T @ streams
    if gradients.own_rows is not None and own_columns is not None:
        add_gradient_of_own_rows_(gradients.own_rows, of_base, projected.x, own_columns)

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
