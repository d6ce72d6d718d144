"""The widened embedding: a token's row of the base, and beside it a row of the expansion (W_in^up
in the paper)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.parallel.collectives import leave_region
from pipeline.parallel.layers import VocabularyParallelEmbedding
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.widened_linear import Streams


class WidenedEmbedding(nn.Module):
    """tokens: [B, S] -> x: [B, S, D], x_up: [B, S, U]; with sequence parallelism [B, S / tp_size,
    ...].

    Attributes:
        base: the base's embedding, [V, D].
        expansion: `W_in^up`, [V, U], which gives x_up its first value; None where nothing is added.
        new_rows: the rows of tokens from `vocab_size` on, [n, D + U], for both streams; None
            without new tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        expansion_size: int | None,
        *,
        new_tokens: int = 0,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.base = VocabularyParallelEmbedding(vocab_size, hidden_size, tp=tp)
        self.expansion: VocabularyParallelEmbedding | None = None
        if expansion_size is not None:
            self.expansion = VocabularyParallelEmbedding(vocab_size, expansion_size, tp=tp)
        self.new_rows: VocabularyParallelEmbedding | None = None
        if new_tokens:
            both_streams = hidden_size + (expansion_size or 0)
            self.new_rows = VocabularyParallelEmbedding(new_tokens, both_streams, tp=tp)

    def forward(self, tokens: Tensor) -> Streams:
        if self.new_rows is not None:
            return self._with_new_tokens(tokens, self.new_rows)
        x = self.base(tokens)
        x_up: Tensor | None = None
        if self.expansion is not None:
            x_up = self.expansion(tokens)
        # Each rank has the rows of its part of the vocabulary: the sum over the ranks has all.
        return leave_region(self.tp, x, x_up)

    def _with_new_tokens(self, tokens: Tensor, new_rows: nn.Module) -> Streams:
        """Each token's row, of `base` and `expansion` or of `new_rows`."""
        is_new = tokens >= self.vocab_size
        # Both look-ups run for all tokens, with index 0 where it does not apply: shapes do not
        # depend on the data, so nothing waits for the device.
        new = new_rows((tokens - self.vocab_size).masked_fill(~is_new, 0))
        of_base = tokens.masked_fill(is_new, 0)
        is_new = is_new.unsqueeze(-1)
        x = torch.where(is_new, new[..., : self.hidden_size], self.base(of_base))
        x_up = None
        if self.expansion is not None:
            x_up = torch.where(is_new, new[..., self.hidden_size :], self.expansion(of_base))
        return leave_region(self.tp, x, x_up)
