"""The widened embedding: the base's rows, and beside them `W_in^up`, from which the expansion stream starts."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.parallel.embedding import VocabularyParallelEmbedding
from pipeline.parallel.regions import leave_region
from pipeline.parallel.topology import TensorParallel


class WidenedEmbedding(nn.Module):
    """tokens: [B, S] -> x: [B, S, D], x_up: [B, S, U] (None where nothing is added).

    Sequence-parallel ranks get their own positions of both: [B, S / tp_size, ...].
    """

    def __init__(self, vocab_size: int, hidden_size: int, expansion_size: int | None, *, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.base = VocabularyParallelEmbedding(vocab_size, hidden_size, tp=tp)
        self.expansion: VocabularyParallelEmbedding | None = None
        if expansion_size is not None:
            self.expansion = VocabularyParallelEmbedding(vocab_size, expansion_size, tp=tp)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return leave_region(self.tp, self.base(tokens), None if self.expansion is None else self.expansion(tokens))
