"""The section `parallel`: the layout of the ranks."""

from __future__ import annotations

from pipeline.config.reading import PositiveInt, Section


class Parallel(Section):
    """The layout of the ranks; the data-parallel size is the world size divided by tp_size."""

    tp_size: PositiveInt = 1
    """tensor-parallel size: ranks that share each layer, best within a node"""
    sequence_parallel: bool = False
    """whether tensor-parallel ranks divide sequences outside the split linear maps, which saves
    memory of activations"""
    expert_size: PositiveInt = 1
    """data-parallel ranks that share the frozen experts of a mixture: each holds some whole and
    computes them for all (docs/sizing.md)"""
    padded_experts: bool = False
    """whether buffers between these ranks have the largest possible size: the host never waits, but
    experts take up to expert_size times the memory"""

    @property
    def fewest_ranks(self) -> int:
        """How many ranks hold one whole model: the number of ranks must be a multiple."""
        return self.tp_size * self.expert_size
