"""How much ZeRO-3 gathers for a micro-batch: a closed formula for DeepSpeed's prefetch, reuse and release rules.

DeepSpeed gathers a module's parameters before each of its uses, forward or backward, and releases them afterwards
unless they are used again within `max_reuse_distance` elements. Prefetching runs ahead until `max_live_parameters`
elements are gathered, and what it has gathered stays. So the formula decides two things for each segment of the model
(the embedding, each layer, the output): whether it stays gathered between consecutive uses (Route's two paths,
recomputation and backward pass), and whether it stays from the forward to the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROOM_BETWEEN_USES = 0.75
"""The share of `max_live_parameters` that a segment may fill and still stay gathered between consecutive uses.

Fitted on a grid of 256 cases of an earlier simulation of DeepSpeed's rules, not on measurements: there the gathers are
off by 5 % on average and by 22 % at worst, with 10 cases above 15 %. In six real ZeRO-3 runs (docs/sizing.md) they
are off by −6.5 % to +3.2 %.
"""


@dataclass(frozen=True)
class GatherSettings:
    """The keys of `zero_optimization` that control gathering, in elements, with DeepSpeed's defaults."""

    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000

    @classmethod
    def of(cls, zero: dict[str, Any]) -> GatherSettings:
        """The settings in the section `zero_optimization` of a DeepSpeed JSON."""
        return cls(**{name: int(zero[f"stage3_{name}"]) for name in cls.__annotations__ if f"stage3_{name}" in zero})


@dataclass(frozen=True)
class Segment:
    """A part of the model whose modules run one after the other: the embedding, a layer, or the output.

    Attributes:
        sizes: the elements of this rank's shard of each parameter.
        backward_uses: how often the backward pass uses each parameter.
        forward_calls: how often the forward pass runs the segment.
        recomputed: whether the backward pass runs the forward pass again.
    """

    sizes: tuple[int, ...]
    backward_uses: tuple[int, ...]
    forward_calls: int = 1
    recomputed: bool = False


@dataclass(frozen=True)
class Gathering:
    """What a micro-batch gathers in total, and the most that is gathered at once (the working set). In elements."""

    gathered: int
    most_at_once: int


def estimate_gathering(segments: Sequence[Segment], settings: GatherSettings) -> Gathering:
    """The formula of docs/sizing.md over `segments`, in the order of the forward pass.

    Parameters of at most `param_persistence_threshold` elements are never partitioned, so never gathered.
    """
    reuse = settings.max_reuse_distance
    live = settings.max_live_parameters if settings.prefetch_bucket_size else 0
    gathered, largest = 0.0, 0
    above = 0  # elements of the segments above that are gathered
    distance = 0  # elements used between the end of a segment's forward and the start of its backward pass
    kept = 0.0  # gathered elements that stay from the forward to the backward pass
    for segment in reversed(segments):
        uses = list(zip(segment.sizes, segment.backward_uses, strict=True))
        partitioned = [(size, times) for size, times in uses if size > settings.param_persistence_threshold]
        whole = sum(size for size, _ in partitioned)
        backward = sum(size for size, times in partitioned if times)
        backward_again = sum(size * (times - 1) for size, times in partitioned if times)
        passes = segment.forward_calls * (2 if segment.recomputed else 1)
        used = sum(size * (passes + times) for size, times in uses)

        between_uses = 0.0 if whole <= ROOM_BETWEEN_USES * live else 1 - _share(reuse, sum(segment.sizes))
        across_turn = 0.0 if above + whole <= live else 1 - _share(reuse - distance, used)
        forward = whole * (1 + (segment.forward_calls - 1) * between_uses)
        if segment.recomputed:
            returning = forward + (backward + backward_again) * between_uses
        else:
            returning = backward + backward_again * between_uses
        gathered += forward + across_turn * returning
        kept += (1 - across_turn) * whole
        above += whole
        distance += used
        largest = max([largest, *(size for size, _ in partitioned)])
    return Gathering(round(gathered), round(min(above, max(kept, live) + largest)))


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole else 1.0
