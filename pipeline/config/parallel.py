"""The section `parallel`: the layout of the ranks."""

from __future__ import annotations

from pipeline.config.reading import PositiveInt, Section


class Parallel(Section):
    """The layout of the ranks; the data-parallel size is the world size divided by tp_size."""

    tp_size: PositiveInt = 1
    """tensor-parallel size: ranks that share each layer, best within a node"""
    sequence_parallel: bool = False
    """whether a tensor-parallel rank holds only its share of each sequence between the shared
    layers, which takes less memory"""
    expert_size: PositiveInt = 1
    """number of data-parallel ranks that share the frozen experts of a mixture: each holds some of
    them whole, and computes them for the tokens of all (docs/sizing.md)"""
    padded_experts: bool = False
    """whether these ranks make room for all rows that their experts could get: the host then never
    waits for the number of rows, but a layer's experts take up to expert_size times the memory"""

    @property
    def fewest_ranks(self) -> int:
        """How many ranks hold the model once."""
        return self.tp_size * self.expert_size
