"""How ZeRO-3 gathers parameters around the modules that use them: DeepSpeed's rules, followed over one micro-batch.

DeepSpeed gathers a module's parameters before it runs, and some of those that will run next (prefetch), as long as not
too many are there already. Afterwards it lets go of those that are not used again soon (reuse distance).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fetch:
    """A module about to run, forward or backward: its parameters, by index, and whether it lets them go afterwards."""

    parameters: tuple[int, ...]
    releases: bool


@dataclass(frozen=True)
class GatherSettings:
    """The keys of `zero_optimization` that govern gathering, in elements, with DeepSpeed's defaults."""

    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000

    @classmethod
    def of(cls, zero: dict[str, Any]) -> GatherSettings:
        """What the section `zero_optimization` of a DeepSpeed JSON says."""
        return cls(**{name: int(zero[f"stage3_{name}"]) for name in cls.__annotations__ if f"stage3_{name}" in zero})


@dataclass(frozen=True)
class Gathering:
    """What a micro-batch gathers in all, and the most that is there at once: the gathered working set. In elements."""

    gathered: int
    most_at_once: int


def simulate_gathering(fetches: Sequence[Fetch], sizes: Sequence[int], settings: GatherSettings) -> Gathering:
    """Follows `fetches` over parameters of `sizes`; parameters at the threshold or below are always there."""
    simulation = _Simulation(fetches, sizes, settings)
    for step in range(len(fetches)):
        simulation.run(step)
    return Gathering(simulation.gathered, simulation.most_at_once)


@dataclass
class _Simulation:
    fetches: Sequence[Fetch]
    sizes: Sequence[int]
    settings: GatherSettings
    available: set[int] = field(default_factory=set)
    elements: int = 0
    gathered: int = 0
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self._persistent = {
            index for index, size in enumerate(self.sizes) if size <= self.settings.param_persistence_threshold
        }
        self._used = [sum(self.sizes[index] for index in fetch.parameters) for fetch in self.fetches]
        uses = ((index, step) for step, fetch in enumerate(self.fetches) for index in dict.fromkeys(fetch.parameters))
        self._queue = deque(uses)
        self._fetched_for: dict[int, int] = {}

    def run(self, step: int) -> None:
        """One module: gather, prefetch, compute, release."""
        fetch = self.fetches[step]
        self._gather(fetch.parameters)
        waiting = {index for index in fetch.parameters if self._fetched_for.get(index, -1) < step}
        while waiting:
            index, used_at = self._queue.popleft()
            self._fetched_for[index] = used_at
            waiting.discard(index)
        self._prefetch()
        self.most_at_once = max(self.most_at_once, self.elements)
        if fetch.releases:
            self._release(fetch, step)

    def _gather(self, parameters: Sequence[int]) -> None:
        missing = {index for index in parameters if index not in self.available and index not in self._persistent}
        self.available |= missing
        count = sum(self.sizes[index] for index in missing)
        self.elements += count
        self.gathered += count

    def _prefetch(self) -> None:
        room = min(self.settings.max_live_parameters - self.elements, self.settings.prefetch_bucket_size)
        chosen: list[int] = []
        count = 0
        while self._queue and count < room:
            index, used_at = self._queue.popleft()
            self._fetched_for[index] = max(self._fetched_for.get(index, -1), used_at)
            if index not in self.available and index not in self._persistent and index not in chosen:
                chosen.append(index)
                count += self.sizes[index]
        self._gather(chosen)

    def _release(self, fetch: Fetch, step: int) -> None:
        # Neither what a prefetch has counted on, nor what is used again within the reuse distance.
        leaving = {index for index in fetch.parameters if self._fetched_for.get(index, -1) <= step}
        distance = 0
        for later in range(step + 1, len(self.fetches)):
            if distance >= self.settings.max_reuse_distance or not leaving:
                break
            leaving.difference_update(self.fetches[later].parameters)
            distance += self._used[later]
        leaving &= self.available
        self.available -= leaving
        self.elements -= sum(self.sizes[index] for index in leaving)
