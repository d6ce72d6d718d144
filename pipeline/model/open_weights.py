"""The weights that only open tokens read: rows, gains, low-rank differences.

A hard gate decides for each token, before any of these weights is read. So an open token may read
weights that a closed one does not, and closed tokens stay the base's to the bit. All of these
weights are differences that start at zero. They begin at one layer, where the paths of open and
closed tokens part (docs/open_weights.md,
docs/adr/0032-open-tokens-read-weights-of-their-own.md).

A decoder's layers and norms get them after they are built, by `add_open_weights`. Which they are is
`pipeline.open_weights`.

Training has no gate: every token is open.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.open_tokens import OpenTokens
from pipeline.open_weights import OpenWeights
from pipeline.parallel.collectives import leave_region
from pipeline.parallel.layers import LayerNorm, LowRankAdapter, RMSNorm, VocabularyParallelEmbedding
from pipeline.parallel.parameters import full_shape_of, partition_of
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan
from pipeline.scale.widened_linear import WidenedLinear
from pipeline.scale.widened_norm import WidenedHeadNorm, WidenedNorm
from pipeline.scale_math import own_row_logits

# The names of own rows as checkpoints store them, each [rows, D].
OWN_INPUT = "own_input.rows.weight"
OWN_OUTPUT = "output.own_rows"


@dataclass(frozen=True)
class OwnColumns:
    """The own output rows of a rank's columns of the logits.

    Attributes:
        row_of_column: [columns], the own row of each.
        own_columns: the columns with a row that is theirs alone.
        their_rows: the rows of those columns; they follow each other, as the ids of tokens ascend.
        is_shared: [columns] in fp32, 1 for those that share one row, padding too, and else 0.
        shared_row: the index of that row.
    """

    row_of_column: Tensor
    own_columns: Tensor
    their_rows: slice
    is_shared: Tensor
    shared_row: int


class OwnRowOfToken:
    """Which own row each token has: one of its own, or the shared one behind them.

    The last `added_tokens` of the vocabulary are new tokens, whose rows are no differences of the
    base's. They read one more row behind the shared one, of zeros.

    Tables are copied to a device once, so that the host never waits for it. They are no buffers: a
    decoder on the meta device, of which one module at a time gets values, would have none for them.
    """

    def __init__(self, tokens: tuple[int, ...], vocab_size: int, added_tokens: int = 0) -> None:
        self.rows = len(tokens) + 1
        self.shared_row = len(tokens)
        ids = torch.tensor(tokens, dtype=torch.long, device="cpu")
        assert list(tokens) == sorted(tokens), "rows are in the order of the ids"
        self._tokens = tokens
        self._table = torch.full((vocab_size,), self.shared_row, dtype=torch.long, device="cpu")
        self._table[ids] = torch.arange(len(tokens), device="cpu")
        if added_tokens:
            self._table[vocab_size - added_tokens :] = self.rows
            self.rows += 1
        self._tables: dict[torch.device, Tensor] = {}
        self._columns: dict[tuple[int, int, int, torch.device], OwnColumns] = {}

    def on(self, device: torch.device) -> Tensor:
        """The row of every token: [V]."""
        if device not in self._tables:
            self._tables[device] = self._table.to(device)
        return self._tables[device]

    def spread(self, own_rows: Tensor) -> Tensor:
        """own_rows: [r, D] -> the row of every token: [V, D]."""
        return own_rows[self.on(own_rows.device)]

    def columns(self, first: int, count: int, width: int, device: torch.device) -> OwnColumns:
        """Those of the tokens from id `first` on, `count` of them, padded to `width` columns."""
        key = (first, count, width, device)
        if key not in self._columns:
            # By lists of Python: `nonzero` would need values where a run is traced without any.
            first_row = bisect_left(self._tokens, first)
            end_row = bisect_left(self._tokens, first + count)
            own_columns = [token - first for token in self._tokens[first_row:end_row]]
            table = self._table[first : first + count]
            table = F.pad(table, (0, width - count), value=self.shared_row)
            self._columns[key] = OwnColumns(
                row_of_column=table.to(device),
                own_columns=torch.tensor(own_columns, dtype=torch.long, device="cpu").to(device),
                their_rows=slice(first_row, end_row),
                is_shared=(table == self.shared_row).float().to(device),
                shared_row=self.shared_row,
            )
        return self._columns[key]


class OwnInputRows(nn.Module):
    """The trained differences of the embedding's rows, for open tokens.

    Attributes:
        rows: [r, D] with `row_of.rows` rows, split over the ranks as the embedding is.
    """

    def __init__(self, row_of: OwnRowOfToken, hidden_size: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.row_of = row_of
        self.rows = VocabularyParallelEmbedding(row_of.rows, hidden_size, tp=tp)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S] -> what is added to x: [B, S, D]; with sequence parallelism as x is split.

        A new token gets zeros, as its row is elsewhere: in training its id is beyond the base's
        vocabulary; of a trained model that is read whole it has the row of zeros.
        """
        table = self.row_of.on(tokens.device)
        is_new = tokens >= len(table)
        rows = self.rows(table[tokens.masked_fill(is_new, 0)])
        rows = rows.masked_fill(is_new.unsqueeze(-1), 0)
        difference, _ = leave_region(self.tp, rows, None)
        return difference


@dataclass(frozen=True)
class OwnInput:
    """What open tokens add to x where open weights begin.

    Attributes:
        layer: the layer that x is about to enter.
        difference: [B, S, D]; with sequence parallelism this rank's positions, as x.
    """

    layer: nn.Module
    difference: Tensor

    def added_to(self, x: Tensor, open_tokens: OpenTokens) -> Tensor:
        """x with the difference of open tokens."""
        return open_tokens.add(x, lambda: self.difference)


def add_open_weights(
    layers: nn.ModuleList, final_norm: WidenedNorm, plan: ExpansionPlan, tp: TensorParallel
) -> None:
    """Gives linear maps and norms the differences that `plan` names, in its layers."""
    for index, layer in enumerate(layers):
        own = plan.own_in(index)
        if own is not None:
            _add_to_parts(layer, own, tp)
    own = plan.own_in(len(layers))
    if own is not None:
        _add_to_parts(final_norm, own, tp)


def _add_to_parts(module: nn.Module, own: OpenWeights, tp: TensorParallel) -> None:
    """Adds the differences of all linear maps and norms within `module`."""
    for path, part in list(module.named_modules()):
        if isinstance(part, WidenedLinear):
            _add_low_rank(part, own.low_rank_of(path.rsplit(".", 1)[-1]), own.low_rank_scale, tp)
        elif own.gains and isinstance(part, WidenedHeadNorm):
            part.own = RMSNorm(part.base.size, part.base.eps, tp, in_region=True)
        elif own.gains and isinstance(part, WidenedNorm):
            (size,) = full_shape_of(part.base.weight)
            kind = LayerNorm if isinstance(part.base, LayerNorm) else RMSNorm
            part.own = kind(size, part.base.eps, tp)


def _add_low_rank(part: WidenedLinear, rank: int | None, scale: float, tp: TensorParallel) -> None:
    """Adds a difference s B A of that rank, split as the map is; None: the map has none."""
    if rank is None:
        return
    weight = part.base.get_parameter("weight")
    size_out, size_in = full_shape_of(weight)
    part.adapter = LowRankAdapter(
        (size_out, size_in), rank, scale=scale, partition=partition_of(weight), tp=tp
    )


def own_logits(x: Tensor, own_rows: Tensor, columns: OwnColumns) -> Tensor:
    """What own output rows add to logits, in fp32: x [n, D], own_rows [r, D] -> [n, columns]."""
    return own_row_logits(x, own_rows, columns.row_of_column)


def add_gradient_of_own_rows_(
    gradient: Tensor, logit_gradient: Tensor, x: Tensor, columns: OwnColumns
) -> None:
    """Adds to `gradient` [r, D], in fp32, that of the own output rows, in place.

    x: [n, D], what the rows multiplied; logit_gradient: [n, columns].

    A row that is one token's own has one column. The gradient of the shared row is a sum over most
    of the vocabulary, which 16 bits would round away: it is taken in fp32. Neither adds to one
    address from many threads: the result is the same in every run.
    """
    of_own_columns = logit_gradient.index_select(1, columns.own_columns)
    gradient[columns.their_rows] += of_own_columns.T @ x
    of_shared_row = logit_gradient.float() @ columns.is_shared
    gradient[columns.shared_row] += of_shared_row.to(x.dtype) @ x
