"""The section `parallel`: the layout of the ranks."""

from __future__ import annotations

from pipeline.config.reading import PositiveInt, Section


class Parallel(Section):
    """The layout of the ranks; the data-parallel size is the world size divided by tp_size."""

    tp_size: PositiveInt = 1
    """ranks that share each layer, best within a node"""
    sequence_parallel: bool = False
    """tensor-parallel ranks divide sequences outside the split maps: less memory of activations"""
    expert_size: PositiveInt = 1
    """data-parallel ranks that share a mixture's frozen experts (docs/sizing.md)"""
    padded_experts: bool = False
    """gives buffers between these ranks the largest possible size: the host never waits, but
    experts take up to expert_size times the memory"""

    @property
    def fewest_ranks(self) -> int:
        """How many ranks hold one whole model: the number of ranks must be a multiple."""
        return self.tp_size * self.expert_size
