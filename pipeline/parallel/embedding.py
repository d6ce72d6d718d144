"""The vocabulary-parallel embedding: each rank holds the rows of its part of the vocabulary.

It does not communicate: `collectives.leave_region` sums the ranks' results.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.sharding import Partition, sharded_parameter
from pipeline.parallel.topology import TensorParallel

VOCABULARY = Partition(dim=0, padded=True)


class VocabularyParallelEmbedding(nn.Module):
    """Looks up tokens in this rank's rows; tokens of other ranks give zeros.

    tokens: [B, S], result: [B, S, D], a partial sum over the ranks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter((vocab_size, hidden_size), VOCABULARY, tp)
        self.first, self.stop = VOCABULARY.bounds(vocab_size, tp.rank, tp.size)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        # A token of another rank looks up row 0 and is then zeroed: exactly one rank contributes,
        # so the sum over the ranks is exact in any order.
        elsewhere = (tokens < self.first) | (tokens >= self.stop)
        rows = F.embedding((tokens - self.first).masked_fill(elsewhere, 0), self.weight)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)
