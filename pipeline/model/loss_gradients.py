"""The inputs of the chunked loss, and the gradients that a chunk of logits adds to them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pipeline.model.hidden_states import HiddenStates
from pipeline.open_tokens import OpenTokens
from pipeline.scale.router import gradients_of_paths

SUMS_16_BITS_IN_FP32 = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether torch multiplies 16 bits into an fp32 sum."""


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
