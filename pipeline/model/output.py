"""The output projection on two streams, and the loss behind it, computed a chunk of tokens at a time.

Logits [B, S, V] in fp32 are never held: each chunk's gradient with respect to the hidden states and the weights is
computed right after its logits, in the forward pass, and only scaled in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.layers import VOCABULARY, greedy_choices_, nll_and_logit_gradient_
from pipeline.parallel.sharding import sharded_parameter
from pipeline.parallel.topology import TensorParallel

# --- The router of SCALE-Route (paper, Eq. 5): per token, the preserved path or the adapted one ---------------------


@torch.no_grad()
def preserved_tokens(z_p: Tensor, z_a: Tensor, threshold: float, tp: TensorParallel) -> Tensor:
    """Which tokens take the preserved path: those where cos(Z_p, Z_a) > threshold.

    z_p, z_a: [N, V / tp_size], this rank's columns of the two paths' base logits, in fp32 and without padding.
    Three sums a token make the cosine, so a split vocabulary costs one all-reduce of three numbers. Returns a mask [N].
    """
    # A product of rows with columns, and not `(z_p * z_a).sum(-1)`: no temporary as large as the logits.
    product = torch.bmm(z_p.unsqueeze(1), z_a.unsqueeze(2)).flatten()
    squares = (torch.linalg.vector_norm(z, dim=-1).square() for z in (z_p, z_a))
    sums = torch.stack([product, *squares])
    if tp.size > 1:
        dist.all_reduce(sums, group=tp.group)
    product, norm_p, norm_a = sums
    return product > threshold * (norm_p * norm_a).sqrt()


# --- The output projection on two streams, and the loss behind it ---

CHUNK_ELEMENTS = 2**25
"""Logits held at a time: 128 MiB in fp32."""


@dataclass(frozen=True)
class HiddenStates:
    """The decoder's last hidden states, one token a row: x [N, D], x_up [N, U].

    Route has those of the preserved path, `preserved_x` and `preserved_x_up`, beside those of the adapted one.
    """

    x: Tensor
    x_up: Tensor | None = None
    preserved_x: Tensor | None = None
    preserved_x_up: Tensor | None = None

    def rows(self, rows: slice) -> HiddenStates:
        """Those of some of the tokens."""
        return HiddenStates(*(None if stream is None else stream[rows] for stream in self))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.x, self.x_up, self.preserved_x, self.preserved_x_up))


class Losses(NamedTuple):
    """How well targets are predicted: of N in a row, or of [B, S].

    total: the summed nll, a scalar to differentiate.
    nll: of each target; zero where nothing is predicted.
    preserved: bool, which tokens Route sent down the preserved path.
    is_greedy_choice: bool, whether greedy decoding chooses the target; None in training, which would be slower for it.
    """

    total: Tensor
    nll: Tensor
    preserved: Tensor
    is_greedy_choice: Tensor | None

    def of_shape(self, shape: torch.Size) -> Losses:
        """The same, a row a sequence."""
        chosen = None if self.is_greedy_choice is None else self.is_greedy_choice.view(shape)
        return Losses(self.total, self.nll.view(shape), self.preserved.view(shape), chosen)


class OutputProjection(nn.Module):
    """logits = W_out x + W_out^up x_up; under Route the paper's Eq. 5 chooses per token.

    The weights are parameters of this module, and not of submodules, because no product of their own uses them.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, expansion_size: int | None, *, threshold: float, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.threshold = threshold
        self.base = sharded_parameter((vocab_size, hidden_size), VOCABULARY, tp)
        self.expansion: nn.Parameter | None = None
        if expansion_size is not None:
            self.expansion = sharded_parameter((vocab_size, expansion_size), VOCABULARY, tp)
        self.first, stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)
        self.columns = max(0, min(stop, vocab_size) - self.first)

    def logits(self, hidden: HiddenStates) -> Tensor:
        """This rank's columns of the logits: [N, V / tp_size], in fp32."""
        return self.route(hidden).logits

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Runs of rows, so short that the logits of one may be held in fp32."""
        size = max(1, CHUNK_ELEMENTS // self.base.shape[0])
        return (slice(first, first + size) for first in range(0, tokens, size))

    def route(self, hidden: HiddenStates) -> Routed:
        """The logits of some tokens, and how they came about."""
        z = F.linear(hidden.x, self.base).float()
        if hidden.x_up is None or self.expansion is None:
            return Routed(z, None, None)
        x_up, preserved = hidden.x_up, None
        if hidden.preserved_x is not None and hidden.preserved_x_up is not None:
            z_p = F.linear(hidden.preserved_x, self.base).float()
            preserved = preserved_tokens(z_p[:, : self.columns], z[:, : self.columns], self.threshold, self.tp)
            column = preserved.unsqueeze(1)
            z = z.lerp_(z_p, column * 0.5)
            # One of the two is chosen per token, so one product with W_out^up serves both.
            x_up = torch.where(column, hidden.preserved_x_up, x_up)
        return Routed(z.add_(F.linear(x_up, self.expansion)), x_up, preserved)

    def forward(self, hidden: HiddenStates, targets: Tensor) -> Losses:
        """How well the targets [N] are predicted."""
        base: Tensor = self.base
        expansion: Tensor | None = self.expansion
        if not torch.is_grad_enabled():
            # Even where autograd records nothing, a function is told that its parameters want gradients.
            base, expansion = base.detach(), None if expansion is None else expansion.detach()
        return Losses(*_ChunkedLoss.apply(self, targets, *hidden, base, expansion))


@dataclass(frozen=True)
class Routed:
    """Logits [n, V / tp_size] in fp32, the expansion stream they read [n, U], and which tokens are preserved [n]."""

    logits: Tensor
    x_up: Tensor | None
    preserved: Tensor | None


class _ChunkedLoss(torch.autograd.Function):
    """Sums the nll over chunks of tokens; the gradients are ready when the forward pass is."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        projection: OutputProjection,
        targets: Tensor,
        x: Tensor,
        x_up: Tensor | None,
        preserved_x: Tensor | None,
        preserved_x_up: Tensor | None,
        base: Tensor,
        expansion: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        hidden = HiddenStates(x, x_up, preserved_x, preserved_x_up)
        wanted = ctx.needs_input_grad[2:]
        # Rows of hidden states are written once; weights are summed over chunks, where 16 bits would lose small terms.
        kinds = (x.dtype,) * 4 + (torch.float32,) * 2
        gradients = _Gradients(
            *(
                None if tensor is None or not needed else torch.zeros_like(tensor, dtype=dtype)
                for tensor, needed, dtype in zip((*hidden, base, expansion), wanted, kinds, strict=True)
            )
        )
        columns: dict[str, Any] = {
            "first": projection.first,
            "vocab_size": projection.vocab_size,
            "tp": projection.tp,
        }
        nll = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        preserved = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
        is_greedy_choice = None if any(wanted) else torch.empty_like(preserved)
        for rows in projection.chunks(len(targets)):
            chunk = hidden.rows(rows)
            routed = projection.route(chunk)
            if routed.preserved is not None:
                preserved[rows] = routed.preserved
            if is_greedy_choice is not None:
                is_greedy_choice[rows] = greedy_choices_(routed.logits, **columns) == targets[rows]
            nll[rows], logit_gradient = nll_and_logit_gradient_(routed.logits, targets[rows], **columns)
            if any(wanted):
                gradients.add(rows, chunk.x, routed, logit_gradient.to(base.dtype), base, expansion)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(nll, preserved)
        return nll.sum(), nll, preserved, is_greedy_choice

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        scaled = (None if gradient is None else gradient * scale for gradient in ctx.gradients.tensors())
        return (None, None, *scaled)


@dataclass
class _Gradients:
    """One gradient for each differentiable input, None where none is wanted."""

    x: Tensor | None
    x_up: Tensor | None
    preserved_x: Tensor | None
    preserved_x_up: Tensor | None
    base: Tensor | None
    expansion: Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.x_up, self.preserved_x, self.preserved_x_up, self.base, self.expansion

    def add(
        self, rows: slice, x: Tensor, routed: Routed, logit_gradient: Tensor, base: Tensor, expansion: Tensor | None
    ) -> None:
        """Adds one chunk's part; logit_gradient: [n, V / tp_size]."""
        preserved = None if routed.preserved is None else routed.preserved.unsqueeze(1)
        if self.x is not None:
            gradient = logit_gradient @ base
            self.x[rows] = gradient if preserved is None else torch.where(preserved, gradient / 2, gradient)
        if self.base is not None:
            self.base += logit_gradient.T @ x
        if expansion is None or routed.x_up is None:
            return
        if self.expansion is not None:
            self.expansion += logit_gradient.T @ routed.x_up
        gradient = logit_gradient @ expansion
        if self.x_up is not None:
            self.x_up[rows] = gradient if preserved is None else gradient.masked_fill(preserved, 0)
        if self.preserved_x_up is not None and preserved is not None:
            self.preserved_x_up[rows] = gradient.masked_fill(~preserved, 0)
