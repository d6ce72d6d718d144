"""The output projection on two streams: logits = W_out x + W_out^up x_up, and the loss of its
targets."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._triton import has_triton

from pipeline.model.chunked_loss import Losses, Projected, chunked_loss
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.open_weights import (
    OwnColumns,
    OwnRowOfToken,
    add_gradient_of_own_rows_,
    own_logits,
)
from pipeline.parallel.cross_entropy import LogitColumns
from pipeline.parallel.parameters import sharded_parameter, sum_gradient_over_replicas
from pipeline.parallel.sharding import REPLICATED, VOCABULARY
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.router import mixed_logits_, mixed_streams, preserved_tokens
from pipeline.scale_math import NEVER, separate_products

CHUNK_ELEMENTS = 2**25
"""How many logits exist at a time on a CPU: 128 MiB in fp32."""
GPU_CHUNK_ELEMENTS = 2**27
"""How many logits exist at a time on a GPU: 512 MiB in fp32. With 2**25 a step of a 1B model takes
5 % (Adapt) to 14 % (full fine-tuning) longer on an H100 (docs/gpu.md), because each chunk adds to
the whole gradient of the output's weights.
"""


def perplexity(nats: float) -> float:
    """exp(nats), for the mean nll of a token; infinite beyond the largest double."""
    if nats >= math.log(sys.float_info.max):
        return math.inf
    return math.exp(nats)


@cache
def compiles_by_default(device: str) -> bool:
    """Whether the loss is compiled on a type of device unless a run says so: where torch has a
    compiler for GPUs. The meta device stands for a GPU."""
    if device == "meta":
        return True
    return device == "cuda" and has_triton() and not torch._dynamo.config.disable


class OutputProjection(nn.Module):
    """logits = W_out x + W_out^up x_up: [N, V]; under Route, Eq. 5 of the paper decides per token.

    The weights are parameters of this module, not of submodules: the loss multiplies with them
    itself, and ZeRO-3 gathers the parameters of a module for its forward pass.

    Attributes:
        base: W_out, [V / tp_size, D].
        expansion: W_out^up, [V / tp_size, U].
        new_rows: [n / tp_size, D + U], the rows of tokens from `vocab_size` on, for both streams.
        own_rows: [r, D], the differences of W_out's rows for open tokens; `own_columns` says which
            row a token has.
        reference: a frozen copy of the base's W_out where W_out itself trains.
        kl_coefficient: the factor of KL(base || model) in the loss.
        threshold: the router's, of Route.
        softcap: with c, a logit is c · tanh(z / c); the router compares z itself.
        logit_factor: a constant factor of z, before it is capped.
        compile_loss: whether the loss of training is compiled; None: on a GPU only, because
            compiling takes longer than a short run on a CPU gains.
        vocabulary: which columns of the logits are this rank's.
        columns: how many of them `base` gives, without padding.
        base_columns: how many of them are of the base's vocabulary. The router compares these
            alone, and after a closed token only these are possible. They are fewer than `columns`
            where `base` also holds the rows of new tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        expansion_size: int | None,
        *,
        new_tokens: int = 0,
        own_row_of: OwnRowOfToken | None = None,
        threshold: float,
        softcap: float | None = None,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.softcap = softcap
        self.vocab_size = vocab_size
        self.threshold = threshold
        self.kl_coefficient = 1.0
        self.logit_factor = 1.0
        self.compile_loss: bool | None = None
        self.base = sharded_parameter((vocab_size, hidden_size), VOCABULARY, tp)
        self.expansion: nn.Parameter | None = None
        if expansion_size is not None:
            self.expansion = sharded_parameter((vocab_size, expansion_size), VOCABULARY, tp)
        self.new_rows: nn.Parameter | None = None
        if new_tokens:
            both_streams = hidden_size + (expansion_size or 0)
            self.new_rows = sharded_parameter((new_tokens, both_streams), VOCABULARY, tp)
        self._own_row_of = own_row_of
        self.own_rows: nn.Parameter | None = None
        if own_row_of is not None:
            # Every rank has all of them: they are few, and each rank's columns need any of them.
            shape = (own_row_of.rows, hidden_size)
            self.own_rows = sharded_parameter(shape, REPLICATED, tp)
        self.reference: nn.Parameter | None = None
        self.vocabulary = LogitColumns(vocab_size, new_tokens, tp)
        self.columns = self.vocabulary.base_count
        self.base_columns = self.vocabulary.base_count

    def own_columns(self) -> OwnColumns:
        """The own rows of this rank's columns of the base's vocabulary."""
        assert self._own_row_of is not None, "its caller has own rows"
        vocabulary = self.vocabulary
        return self._own_row_of.columns(
            vocabulary.first, vocabulary.base_count, vocabulary.base_width, self.base.device
        )

    def forward(self, hidden: HiddenStates, targets: Tensor, kl_tokens: int = 0) -> Losses:
        """The losses of targets: [N].

        The first `kl_tokens` train by KL; `hidden.reference` has at least as many rows.
        """
        return chunked_loss(self, hidden, targets, kl_tokens)

    def logits(self, hidden: HiddenStates) -> Tensor:
        """This rank's columns of the logits: [N, V / tp_size], in fp32."""
        return self.project(hidden).logits

    def own_rows_of_all_ranks(self) -> Tensor | None:
        """The own rows, whose gradient is the sum of those of all ranks' columns."""
        if self.own_rows is None:
            return None
        return sum_gradient_over_replicas(self.own_rows, self.tp)

    def open_weight(self) -> Tensor | None:
        """W_out with the own rows added: [V / tp_size, D]; None without own rows.

        Where every token is open, as in training, one product takes the place of two. It costs the
        memory of one more W_out while the loss is computed.
        """
        if self.own_rows is None:
            return None
        rows = F.embedding(self.own_columns().row_of_column, self.own_rows.detach())
        return rows.add_(self.base.detach())

    def add_gradient_of_own_rows_(self, gradient: Tensor, of_base: Tensor, x: Tensor) -> None:
        """Adds to `gradient` [r, D] that of the own rows, where `open_weight` multiplied x [n, D];
        of_base: [n, columns], the gradient of the logits of the base's vocabulary."""
        add_gradient_of_own_rows_(gradient, of_base, x, self.own_columns())

    @property
    def compiles_loss(self) -> bool:
        """Whether the loss of training is compiled on this device."""
        if self.compile_loss is not None:
            return self.compile_loss
        return compiles_by_default(self.base.device.type)

    def project(
        self, hidden: HiddenStates, open_weight: Tensor | None = None, *, summed: bool = True
    ) -> Projected:
        """The logits of n tokens, with the streams and the matrix that they are products of.

        `open_weight`, that of the method of this name, is for tokens that are all open. Unless
        `summed`, logits that are the sum of two products and nothing else come as these.
        """
        weight = self.base if open_weight is None else open_weight
        if not summed and self._is_plain_sum(hidden, open_weight):
            z = self._base_product(hidden.x, weight)
            z_up: Tensor | None = None
            if hidden.x_up is not None and self.expansion is not None:
                z_up = F.linear(hidden.x_up, self.expansion)
            return Projected(z, weight, hidden.x, hidden.x_up, logits_of_x_up=z_up)
        z = self._base_logits(hidden.x, weight)
        x = hidden.x
        x_up = hidden.x_up
        preserved: Tensor | None = None
        if hidden.preserved_x is not None:
            z_p = self._base_logits(hidden.preserved_x, weight)
            preserved = self._route(z_p, z)
            z = mixed_logits_(z_p, z, preserved)
            preserved_path = (hidden.preserved_x, hidden.preserved_x_up)
            x, x_up = mixed_streams(preserved_path, (x, x_up), preserved)
        if x_up is not None and self.expansion is not None:
            z = z.add_(F.linear(x_up, self.expansion))
        closed = hidden.open_tokens.closed
        if open_weight is None and not hidden.open_tokens.none:
            z = self._with_own_rows_(z, x, closed)
        z = self._capped_(z)
        if self.new_rows is not None:
            z = self._with_new_tokens(z, x, x_up, self.new_rows)
        if closed is not None:
            # No new token may follow a token that the gate closed.
            z[:, self.base_columns :].masked_fill_(closed, NEVER)
        return Projected(z, weight, x, x_up, preserved)

    def chunks(self, tokens: int, kl_tokens: int = 0) -> Iterator[slice]:
        """Runs of rows with a chunk of logits each; none holds rows on both sides of
        `kl_tokens`."""
        elements = GPU_CHUNK_ELEMENTS  # also on the meta device, which stands for a GPU
        if self.base.device.type == "cpu":
            elements = CHUNK_ELEMENTS
        rows = elements // self.vocabulary.width
        # Soft-capping keeps one more value for each logit, KL two more: the base's logit, and the
        # difference.
        # Own rows take as much again: in training while the gradient of the shared row is summed
        # in fp32, otherwise while they are added.
        capped = int(self.softcap is not None) + int(self.own_rows is not None)
        size = max(1, rows // (1 + capped))
        kl_size = max(1, rows // (3 + capped))
        for first in range(0, kl_tokens, kl_size):
            yield slice(first, min(first + kl_size, kl_tokens))
        for first in range(kl_tokens, tokens, size):
            yield slice(first, first + size)

    def slopes(self, logits: Tensor) -> Tensor | None:
        """The derivatives of soft-capped `logits` with respect to z; None without capping.
        Impossible ones have 0."""
        if self.softcap is None:
            return None
        # d(c tanh(z / c)) / dz = 1 - tanh²(z / c)
        return (1 - (logits / self.softcap).square_()).clamp_(min=0)

    def reference_logits(self, x: Tensor) -> Tensor:
        """This rank's columns of the base's logits, in fp32:
        its last hidden states x [n, D] -> [n, V / tp_size].

        New tokens are impossible for the base, so that KL(base || model) counts the probability
        that they take away.
        """
        weight = self.base if self.reference is None else self.reference
        z = self._capped_(F.linear(x, weight).float())
        if self.new_rows is None:
            return z
        z[:, self.columns :] = NEVER
        return F.pad(z, (0, self.vocabulary.new_width), value=NEVER)

    def _with_own_rows_(self, z: Tensor, x: Tensor, closed: Tensor | None) -> Tensor:
        """z: [n, V / tp_size] in fp32, overwritten; the logits of `closed` tokens [n, 1] stay."""
        if self.own_rows is None:
            return z
        change = own_logits(x, self.own_rows, self.own_columns())
        if closed is not None:
            change = change.masked_fill_(closed, 0)
        return z.add_(change)

    def _is_plain_sum(self, hidden: HiddenStates, open_weight: Tensor | None) -> bool:
        """Whether logits are W_out x + W_out^up x_up, and nothing is done to them after."""
        is_changed = self.softcap is not None or self.logit_factor != 1.0
        has_separate_rows = self.own_rows is not None and open_weight is None
        has_more = self.new_rows is not None or has_separate_rows
        by_token = hidden.preserved_x is not None or hidden.open_tokens.closed is not None
        return not (is_changed or has_more or by_token)

    def _base_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """`weight` x in fp32."""
        return self._base_product(x, weight).float()

    def _base_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`weight` x; the base's own columns are the same to the bit whether others follow them or
        not."""
        if self.base_columns == self.columns:
            return F.linear(x, weight)
        rows = [self.base_columns, len(weight) - self.base_columns]
        return separate_products(x, weight, rows)

    def _route(self, z_p: Tensor, z_a: Tensor) -> Tensor:
        """Which tokens take Route's preserved path: bool [n]. One all-reduce where the vocabulary
        is split."""
        of_base = slice(self.base_columns)
        return preserved_tokens(z_p[:, of_base], z_a[:, of_base], self.threshold, self.tp)

    def _with_new_tokens(
        self, z: Tensor, x: Tensor, x_up: Tensor | None, new_rows: Tensor
    ) -> Tensor:
        """z: [n, V / tp_size] -> [n, (V + new) / tp_size], the logits of new tokens behind; padding
        is impossible."""
        width = x.shape[1]
        new = F.linear(x, new_rows[:, :width]).float()
        if x_up is not None:
            new += F.linear(x_up, new_rows[:, width:])
        new = self._capped_(new)
        z[:, self.columns :] = NEVER
        new[:, self.vocabulary.new_count :] = NEVER
        return torch.cat([z, new], dim=1)

    def _capped_(self, z: Tensor) -> Tensor:
        """z: fp32, overwritten."""
        if self.softcap is None:
            return z
        return z.div_(self.softcap).tanh_().mul_(self.softcap)
