"""Which rank runs on which node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from pipeline import log
from pipeline.training.preflight.finding import Finding


@dataclass(frozen=True)
class Ranks:
    """The node of every rank, by rank, as Slurm's options know it; and which rank this is."""

    nodes: tuple[str, ...]
    own: int

    @cached_property
    def first_on(self) -> dict[str, int]:
        """The lowest rank of each node, in the order of ranks."""
        first: dict[str, int] = {}
        for rank, node in enumerate(self.nodes):
            first.setdefault(node, rank)
        return first

    @property
    def speaks_for_node(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.first_on[self.nodes[self.own]] == self.own

    @property
    def on_this_node(self) -> int:
        """How many ranks share this one's node."""
        return self.nodes.count(self.nodes[self.own])

    def among(self, ranks: Iterable[int]) -> list[str]:
        """The nodes of `ranks`, each once."""
        return list(dict.fromkeys(self.nodes[rank] for rank in ranks))


def gather_ranks() -> Ranks:
    """Asks every rank where it runs; every rank must call it."""
    nodes = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, log.node())
    return Ranks(tuple(nodes), dist.get_rank())


def describe(ranks: Ranks) -> Finding:
    """Who is there. That none is missing was checked when they joined."""
    counts = Counter(ranks.nodes)
    most, least = max(counts.values()), min(counts.values())
    shares = f"{most} on each of" if most == least else f"{least} to {most} on each of"
    return Finding(f"{len(ranks.nodes)} rank(s), {shares} {len(counts)} node(s): {', '.join(counts)}")
