"""The ranks that are to train a run, with their nodes, as the checks of the preflight see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipeline.checks.inputs import RunInputs
from pipeline.parallel.topology import ProcessGroups
from pipeline.sizing.cluster import Cluster

if TYPE_CHECKING:
    from pipeline.sizing.estimate import Estimator


@dataclass(frozen=True)
class Allocation:
    """The ranks that are to train a run.

    Args:
        inputs: What the run reads.
        groups: The process groups of the ranks.
        device: This rank's device.
        nodes: The Slurm name of every rank's node, by rank.
    """

    inputs: RunInputs
    groups: ProcessGroups
    device: torch.device
    nodes: list[str]

    @property
    def first_ranks(self) -> list[int]:
        """The lowest rank of each node."""
        return [self.nodes.index(node) for node in dict.fromkeys(self.nodes)]

    @property
    def is_first_on_node(self) -> bool:
        """Whether this rank is the lowest of its node."""
        return dist.get_rank() in self.first_ranks

    @property
    def ranks_on_node(self) -> int:
        """The number of ranks on this rank's node."""
        return self.nodes.count(self.nodes[dist.get_rank()])

    def estimator(self) -> Estimator:
        """The estimate of the run's own layout."""
        # Its imports take seconds, and every stage imports this module.
        from pipeline.sizing.estimate import estimator_of

        cluster = Cluster(len(self.nodes), gpus_per_node=self.ranks_on_node)
        return estimator_of(
            self.inputs.config, self.inputs.base.spec, self.inputs.deepspeed_config, cluster
        )
