"""The output projection on two streams and the loss, computed for a chunk of tokens at a time.

The logits [B, S, V] never exist at once. The forward pass computes each chunk's gradients with respect to the hidden
states and the weights right after its logits; the backward pass only scales them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.cross_entropy import (
    IGNORED,
    greedy_choices_,
    kl_and_logit_gradient_,
    nll_and_logit_gradient_,
)
from pipeline.parallel.embedding import VOCABULARY
from pipeline.parallel.sharding import sharded_parameter
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.router import preserved_tokens

CHUNK_ELEMENTS = 2**25
"""How many logits exist at a time on a CPU: 128 MiB in fp32."""
GPU_CHUNK_ELEMENTS = 2**27
"""The same on a GPU: 512 MiB. With 2**25 a step of a 1B model takes 5 % (Adapt) to 14 % (full fine-tuning) longer on
an H100 (docs/gpu.md), because each chunk adds to the whole gradient of the output's weights.
"""
NEVER = -1e30
"""A logit whose probability is 0. It is finite, because KL subtracts such logits."""


def perplexity(nats: float) -> float:
    """exp(nats), for the mean nll of a token; infinite beyond the largest double."""
    return math.exp(nats) if nats < math.log(sys.float_info.max) else math.inf


@dataclass(frozen=True)
class HiddenStates:
    """The decoder's last hidden states, one token a row: x [N, D], x_up [N, U].

    Route adds those of the preserved path, `preserved_x` and `preserved_x_up`; x and x_up are the adapted path's.
    `reference` [R, D] are the base's own of the first R tokens, for rehearsal. Where `closed` [N] is true, no new piece
    may follow the token: a gate closed it.
    """

    x: Tensor
    x_up: Tensor | None = None
    preserved_x: Tensor | None = None
    preserved_x_up: Tensor | None = None
    reference: Tensor | None = None
    closed: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> HiddenStates:
        """The hidden states of some of the tokens, without `reference`."""
        all_states = (*self, None, self.closed)
        return HiddenStates(*(None if states is None else states[rows] for states in all_states))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.x, self.x_up, self.preserved_x, self.preserved_x_up))


class Losses(NamedTuple):
    """The losses of N targets, [N] or [B, S].

    Attributes:
        total: the summed nll and, times their coefficients, the summed kl and the loss that balances experts, where
            routers train (a scalar), to differentiate.
        nll: each target's negative log likelihood, fp32; zero where nothing is predicted, or kl is measured instead.
        kl: KL(base || model) at each token of a rehearsed sequence, in nats, fp32; zero elsewhere.
        preserved: bool; which tokens took Route's preserved path.
        is_greedy_choice: bool; whether greedy decoding chooses the target. None while gradients are computed, to save
            time.
    """

    total: Tensor
    nll: Tensor
    kl: Tensor
    preserved: Tensor
    is_greedy_choice: Tensor | None

    def of_shape(self, shape: torch.Size) -> Losses:
        """The same, reshaped to `shape`."""
        chosen = None if self.is_greedy_choice is None else self.is_greedy_choice.view(shape)
        return Losses(
            self.total,
            self.nll.view(shape),
            self.kl.view(shape),
            self.preserved.view(shape),
            chosen,
        )


class OutputProjection(nn.Module):
    """logits = W_out x + W_out^up x_up: [N, V]; under Route, Eq. 5 of the paper decides per token.

    The weights are parameters of this module, not of submodules, because `_ChunkedLoss` multiplies with them.
    `reference` is a frozen copy of the base's W_out where W_out itself trains. `kl_coefficient` is the factor of
    KL(base || model) in the loss. With `softcap` c a logit is c · tanh(z / c); the router compares z itself.

    `new_rows`: [n, D + U] are those of tokens from `vocab_size` on, for both streams. They are split over the ranks
    like the others: the logits of a rank are its columns of the base's vocabulary, then its columns of the new one.
    `base_columns`: how many of this rank's columns are of the base's vocabulary. The router compares these alone, and
    the token after a closed one is of these. They are fewer than the rows of `base` where new rows are part of it.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        expansion_size: int | None,
        *,
        new_rows: int = 0,
        threshold: float,
        softcap: float | None = None,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.softcap = softcap
        self.vocab_size = vocab_size
        self.threshold = threshold
        self.base = sharded_parameter((vocab_size, hidden_size), VOCABULARY, tp)
        self.expansion: nn.Parameter | None = None
        if expansion_size is not None:
            self.expansion = sharded_parameter((vocab_size, expansion_size), VOCABULARY, tp)
        self.new_rows: nn.Parameter | None = None
        if new_rows:
            self.new_rows = sharded_parameter(
                (new_rows, hidden_size + (expansion_size or 0)), VOCABULARY, tp
            )
        self.reference: nn.Parameter | None = None
        self.kl_coefficient = 1.0
        self.first, stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)
        self.columns = self.base_columns = max(0, min(stop, vocab_size) - self.first)
        first_new, stop_new = VOCABULARY.bounds(new_rows, tp.rank, tp.size)
        self._new_columns = max(0, min(stop_new, new_rows) - first_new)
        self._widths = stop - self.first, stop_new - first_new

    def logits(self, hidden: HiddenStates) -> Tensor:
        """This rank's columns of the logits: [N, V / tp_size], in fp32."""
        return self.route(hidden).logits

    def chunks(self, tokens: int, kl_tokens: int = 0) -> Iterator[slice]:
        """Runs of rows with a chunk of logits each; none holds rows on both sides of `kl_tokens`.

        KL needs three values for each logit, soft-capping one more.
        """
        # The meta device stands for a GPU.
        elements = CHUNK_ELEMENTS if self.base.device.type == "cpu" else GPU_CHUNK_ELEMENTS
        size, capped = elements // sum(self._widths), int(self.softcap is not None)
        size, kl_size = max(1, size // (1 + capped)), max(1, size // (3 + capped))
        for first in range(0, kl_tokens, kl_size):
            yield slice(first, min(first + kl_size, kl_tokens))
        for first in range(kl_tokens, tokens, size):
            yield slice(first, first + size)

    def route(self, hidden: HiddenStates) -> Routed:
        """The logits of n tokens, and which path each took."""
        z = self._of_base(hidden.x)
        if hidden.x_up is None or self.expansion is None:
            return Routed(
                self._allowed(self._with_new_columns(z, hidden.x, None), hidden),
                hidden.x,
                None,
                None,
            )
        x, x_up, preserved = hidden.x, hidden.x_up, None
        if hidden.preserved_x is not None and hidden.preserved_x_up is not None:
            z_p = self._of_base(hidden.preserved_x)
            compared = z_p[:, : self.base_columns], z[:, : self.base_columns]
            preserved = preserved_tokens(*compared, self.threshold, self.tp)
            column = preserved.unsqueeze(1)
            z = z.lerp_(z_p, column * 0.5)
            # Each token takes one path, so one product with W_out^up serves both.
            x_up = torch.where(column, hidden.preserved_x_up, x_up)
            x = (
                torch.where(column, (x + hidden.preserved_x) / 2, x)
                if self.new_rows is not None
                else x
            )
        z = z.add_(F.linear(x_up, self.expansion))
        return Routed(self._allowed(self._with_new_columns(z, x, x_up), hidden), x, x_up, preserved)

    def _of_base(self, x: Tensor) -> Tensor:
        """W_out x in fp32; the base's own columns are the same to the bit whether others follow them or not."""
        if self.base_columns == self.columns:
            return F.linear(x, self.base).float()
        widths = [self.base_columns, len(self.base) - self.base_columns]
        return torch.cat([F.linear(x, part) for part in self.base.split(widths)], dim=1).float()

    def _allowed(self, z: Tensor, hidden: HiddenStates) -> Tensor:
        """z: [n, columns], overwritten; new pieces are impossible after a closed token."""
        if hidden.closed is not None:
            z[:, self.base_columns :].masked_fill_(hidden.closed.unsqueeze(1), NEVER)
        return z

    def _with_new_columns(self, z: Tensor, x: Tensor, x_up: Tensor | None) -> Tensor:
        """The logits with those of the new rows: z [n, V / tp_size] -> [n, (V + new) / tp_size], padding impossible."""
        z = self._capped(z)
        if self.new_rows is None:
            return z
        width = x.shape[1]
        new = F.linear(x, self.new_rows[:, :width]).float()
        if x_up is not None:
            new += F.linear(x_up, self.new_rows[:, width:])
        new = self._capped(new)
        z[:, self.columns :] = NEVER
        new[:, self._new_columns :] = NEVER
        return torch.cat([z, new], dim=1)

    def _capped(self, z: Tensor) -> Tensor:
        """z: fp32, overwritten."""
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)

    def slopes(self, logits: Tensor) -> Tensor | None:
        """The derivatives of soft-capped `logits` with respect to z; None without capping. Impossible ones have 0."""
        return (
            None if self.softcap is None else (1 - (logits / self.softcap).square_()).clamp_(min=0)
        )

    def reference_logits(self, x: Tensor) -> Tensor:
        """This rank's columns of the base's logits, in fp32: its last hidden states x [n, D] -> [n, V / tp_size].

        New tokens are impossible for the base, so that KL(base || model) counts the probability that they take away.
        """
        z = self._capped(
            F.linear(x, self.base if self.reference is None else self.reference).float()
        )
        if self.new_rows is None:
            return z
        z[:, self.columns :] = NEVER
        return F.pad(z, (0, self._widths[1]), value=NEVER)

    def places(self, tokens: Tensor) -> Tensor:
        """The column of each token [N], counted over the columns of all ranks; IGNORED stays."""
        if self.new_rows is None:
            return tokens
        is_new = tokens >= self.vocab_size
        old_width, new_width = self._widths
        index = torch.where(is_new, tokens - self.vocab_size, tokens)
        width = torch.where(is_new, new_width, old_width)
        places = (
            index // width * (old_width + new_width)
            + index % width
            + torch.where(is_new, old_width, 0)
        )
        return torch.where(tokens == IGNORED, tokens, places)

    def all_columns(self) -> dict[str, Any]:
        """Which of all ranks' columns are this rank's, for the functions of `parallel.cross_entropy`."""
        if self.new_rows is None:
            return {"first": self.first, "vocab_size": self.vocab_size, "tp": self.tp}
        width = sum(self._widths)
        return {"first": self.tp.rank * width, "vocab_size": self.tp.size * width, "tp": self.tp}

    def forward(self, hidden: HiddenStates, targets: Tensor, kl_tokens: int = 0) -> Losses:
        """The losses of targets: [N]. The first `kl_tokens` are rehearsed; `hidden.reference` has at least as many."""
        base: Tensor = self.base
        expansion: Tensor | None = self.expansion
        new_rows: Tensor | None = self.new_rows
        if not torch.is_grad_enabled():
            # `needs_input_grad` is true for parameters even under no_grad: unused gradients would be computed.
            base, expansion = base.detach(), None if expansion is None else expansion.detach()
            new_rows = None if new_rows is None else new_rows.detach()
        reference = None if hidden.reference is None else hidden.reference[:kl_tokens]
        return Losses(
            *_ChunkedLoss.apply(
                self, targets, reference, hidden.closed, *hidden, base, expansion, new_rows
            )
        )


@dataclass(frozen=True)
class Routed:
    """Logits [n, columns] in fp32, the streams behind them (x [n, D]: new rows' only), and which are preserved [n]."""

    logits: Tensor
    x: Tensor
    x_up: Tensor | None
    preserved: Tensor | None


class _ChunkedLoss(torch.autograd.Function):
    """Sums the losses over chunks of tokens; the forward pass computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        projection: OutputProjection,
        targets: Tensor,
        reference: Tensor | None,
        closed: Tensor | None,
        x: Tensor,
        x_up: Tensor | None,
        preserved_x: Tensor | None,
        preserved_x_up: Tensor | None,
        base: Tensor,
        expansion: Tensor | None,
        new_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        hidden = HiddenStates(x, x_up, preserved_x, preserved_x_up, closed=closed)
        wanted = ctx.needs_input_grad[4:]
        # Gradients of hidden states are written once. Those of weights are summed over chunks: in fp32, since 16 bits
        # would lose small terms.
        kinds = (x.dtype,) * 4 + (torch.float32,) * 3
        gradients = _Gradients(
            *(
                None if tensor is None or not needed else torch.zeros_like(tensor, dtype=dtype)
                for tensor, needed, dtype in zip(
                    (*hidden, base, expansion, new_rows), wanted, kinds, strict=True
                )
            )
        )
        columns, places = projection.all_columns(), projection.places(targets)
        nll = torch.zeros(len(targets), dtype=torch.float32, device=targets.device)
        kl = torch.zeros_like(nll)
        preserved = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
        is_greedy_choice = None if any(wanted) else torch.empty_like(preserved)
        for rows in projection.chunks(len(targets), 0 if reference is None else len(reference)):
            chunk = hidden.rows(rows)
            routed = projection.route(chunk)
            if routed.preserved is not None:
                preserved[rows] = routed.preserved
            slopes = projection.slopes(routed.logits) if any(wanted) else None
            if is_greedy_choice is not None:
                is_greedy_choice[rows] = greedy_choices_(routed.logits, **columns) == places[rows]
            if reference is not None and rows.start < len(reference):
                base_logits, ignored = (
                    projection.reference_logits(reference[rows]),
                    targets[rows] == IGNORED,
                )
                kl[rows], logit_gradient = kl_and_logit_gradient_(
                    routed.logits, base_logits, ignored, **columns
                )
                logit_gradient *= projection.kl_coefficient
            else:
                nll[rows], logit_gradient = nll_and_logit_gradient_(
                    routed.logits, places[rows], **columns
                )
            if slopes is not None:
                logit_gradient *= slopes
            if any(wanted):
                gradients.add(
                    rows, chunk.x, routed, logit_gradient.to(base.dtype), base, expansion, new_rows
                )
        ctx.gradients = gradients
        ctx.mark_non_differentiable(nll, kl, preserved)
        total = nll.sum() if reference is None else nll.sum() + projection.kl_coefficient * kl.sum()
        return total, nll, kl, preserved, is_greedy_choice

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (getattr(ctx.gradients, kind.name) for kind in fields(_Gradients))
        scaled = (None if gradient is None else gradient * scale for gradient in gradients)
        return (None, None, None, None, *scaled)


@dataclass
class _Gradients:
    """One gradient for each differentiable input of `_ChunkedLoss`; None where it is not needed."""

    x: Tensor | None
    x_up: Tensor | None
    preserved_x: Tensor | None
    preserved_x_up: Tensor | None
    base: Tensor | None
    expansion: Tensor | None
    new_rows: Tensor | None

    def add(
        self,
        rows: slice,
        x: Tensor,
        routed: Routed,
        logit_gradient: Tensor,
        base: Tensor,
        expansion: Tensor | None,
        new_rows: Tensor | None,
    ) -> None:
        """Adds one chunk's part. x: [n, D], logit_gradient: [n, V / tp_size]."""
        preserved = None if routed.preserved is None else routed.preserved.unsqueeze(1)
        of_new, width = logit_gradient[:, len(base) :], x.shape[1]
        logit_gradient = logit_gradient[:, : len(base)]
        if self.x is not None:
            gradient = logit_gradient @ base
            if new_rows is not None:
                gradient += of_new @ new_rows[:, :width]
            self.x[rows] = (
                gradient if preserved is None else torch.where(preserved, gradient / 2, gradient)
            )
            if self.preserved_x is not None and preserved is not None:
                self.preserved_x[rows] = (gradient / 2).masked_fill(~preserved, 0)
        if self.new_rows is not None:
            streams = routed.x if routed.x_up is None else torch.cat([routed.x, routed.x_up], dim=1)
            self.new_rows += of_new.T @ streams
        if self.base is not None:
            self.base += logit_gradient.T @ x
        if expansion is None or routed.x_up is None:
            return
        if self.expansion is not None:
            self.expansion += logit_gradient.T @ routed.x_up
        gradient = logit_gradient @ expansion
        if new_rows is not None:
            gradient += of_new @ new_rows[:, width:]
        if self.x_up is not None:
            self.x_up[rows] = gradient if preserved is None else gradient.masked_fill(preserved, 0)
        if self.preserved_x_up is not None and preserved is not None:
            self.preserved_x_up[rows] = gradient.masked_fill(~preserved, 0)
