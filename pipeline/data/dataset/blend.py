"""The order in which samples are drawn, as arithmetic: which corpus at a global index, and a random order of samples.

A blend is made of blocks. In a block of `size` draws each corpus has a quota; position p of the block maps to slot
`p · g mod size`, where g is near size / golden ratio and coprime to size, and each corpus owns consecutive slots, as
many as its quota. So any run of consecutive draws, however short, has nearly the right proportions. How often a corpus
was drawn before is a count of lattice points under a line, which needs no table and no pass over the block. When a
corpus reaches its budget, the others continue among themselves.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from pipeline.config.data import Role
from pipeline.errors import DataError

BLOCK = 1 << 16
"""Draws in a block: a proportion is rounded to a multiple of 1 / BLOCK."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_ROUNDS = 6
_MASK_64 = 2**64 - 1


class Share(NamedTuple):
    """A corpus in a blend: its weight in its role, and after how many samples it is exhausted (None: never)."""

    weight: float
    budget: int | None
    role: Role = "new"


class Draw(NamedTuple):
    """The sample at a global index is the `occurrence`-th one drawn from `corpus`."""

    corpus: str
    occurrence: int


class Blend:
    """Maps global indices to corpora.

    Args:
        shares: the corpora, in an order that must not change during a run.
        fractions: the fraction of draws from the corpora of each role except `new`, which gets the rest; within a role
            the weights decide. The blend ends when every new corpus is exhausted.

    Attributes:
        total: the number of samples, or None if a new corpus is never exhausted.
    """

    def __init__(
        self, shares: Mapping[str, Share], fractions: Mapping[Role, float] | None = None
    ) -> None:
        self.names = list(shares)
        self._shares = list(shares.values())
        self._fractions = {
            role: Fraction(fraction).limit_denominator(BLOCK)
            for role, fraction in (fractions or {}).items()
        }
        self._segments = self._lay_out()
        self._starts = [segment.start for segment in self._segments]
        self.total = self._segments[-1].stop

    def __getitem__(self, index: int) -> Draw:
        """The draw at the global `index`. Raises DataError where the blend ends before it."""
        if index < 0:
            raise IndexError(f"global index {index} is below 0")
        if self.total is not None and index >= self.total:
            raise DataError(
                f"data: the corpora give {self.total} samples in all, but sample {index} was asked for; "
                "raise epochs or token_budget, or lower schedule.steps"
            )
        segment = self._segment(index)
        position = (index - segment.start) % segment.block_size
        slot = position * segment.stride % segment.block_size
        corpus = bisect.bisect_right(segment.slot_ends, slot)
        return Draw(self.names[corpus], segment.drawn_before(index, corpus))

    def drawn_before(self, index: int) -> dict[str, int]:
        """How many of the draws before the global `index`, at most `total`, went to each corpus."""
        segment = self._segment(index)
        return {name: segment.drawn_before(index, corpus) for corpus, name in enumerate(self.names)}

    def _segment(self, index: int) -> _Segment:
        return self._segments[bisect.bisect_right(self._starts, index) - 1]

    def _lay_out(self) -> list[_Segment]:
        """At most two segments per corpus: full blocks while budgets last, then a smaller one for the first to end."""
        segments: list[_Segment] = []
        start, drawn = 0, [0] * len(self._shares)
        while any(
            share.role == "new" and _left(share, used)
            for share, used in zip(self._shares, drawn, strict=True)
        ):
            left = [_left(share, used) for share, used in zip(self._shares, drawn, strict=True)]
            quotas = self._quotas(left)
            counts = [
                int(left[c] // quotas[c])
                for c in range(len(left))
                if quotas[c] and left[c] != math.inf
            ]
            blocks = min(counts, default=None)
            if blocks == 0:
                blocks, quotas = 1, _last_quotas(quotas, left)
            segments.append(_Segment(start, blocks, tuple(quotas), tuple(drawn)))
            if blocks is None:
                break
            start += blocks * sum(quotas)
            drawn = [used + blocks * quota for used, quota in zip(drawn, quotas, strict=True)]
        return segments

    def _quotas(self, left: Sequence[float]) -> list[int]:
        """How many of BLOCK draws each corpus gets that is not exhausted; at least one if its share is not 0."""
        live = [share for share, remaining in zip(self._shares, left, strict=True) if remaining]
        weights: dict[Role, float] = {}
        for share in live:
            weights[share.role] = weights.get(share.role, 0.0) + share.weight
        # A role whose corpora are all exhausted leaves its draws to the new ones.
        fractions = {
            role: fraction for role, fraction in self._fractions.items() if role in weights
        }
        fractions["new"] = 1 - sum(fractions.values(), Fraction(0))
        exact = [
            float(fractions.get(share.role, 0) * BLOCK) * share.weight / weights[share.role]
            if remaining
            else 0.0
            for share, remaining in zip(self._shares, left, strict=True)
        ]
        quotas = [max(1, math.floor(value)) if value else 0 for value in exact]
        by_remainder = sorted(range(len(exact)), key=lambda c: quotas[c] - exact[c])
        for c in by_remainder[: max(0, BLOCK - sum(quotas))]:
            quotas[c] += 1
        return quotas


def tempered(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """A factor of each corpus's weight: its size to the power of 1 / temperature, 1 for the largest.

    At 1 corpora are drawn in proportion to their sizes; the higher it is, the more evenly. See Conneau and Lample,
    "Cross-lingual Language Model Pretraining", NeurIPS 2019, whose alpha is 1 / temperature.
    """
    largest = max(sizes.values())
    return {name: (size / largest) ** (1 / temperature) for name, size in sizes.items()}


class Permutation:
    """A random permutation of range(size), determined by `key`, evaluated at one point in constant time.

    A Feistel network permutes 4**k values, slightly more than `size`; a value outside the range is permuted again until
    it falls inside ("cycle walking"), which keeps the map one-to-one. See Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [mix(*key, number) for number in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        """The image of `index`. Raises IndexError where it is not in range(size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside range({self.size})")
        value = self._once(index)
        while value >= self.size:
            value = self._once(value)
        return value

    def _once(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right


def mix(*values: int) -> int:
    """A 64-bit hash of integers (the finalizer of SplitMix64, chained)."""
    state = 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK_64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK_64
        state ^= state >> 31
    return state


def floor_sum(count: int, modulus: int, factor: int, offset: int) -> int:
    """The sum of floor((factor · k + offset) / modulus) over k in range(count), with Euclid's algorithm."""
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (factor // modulus) + count * (offset // modulus)
        factor, offset = factor % modulus, offset % modulus
        # Count the lattice points under the line along the other axis.
        count, offset = divmod(factor * count + offset, modulus)
        modulus, factor = factor, modulus
    return total


@dataclass(frozen=True)
class _Segment:
    """Blocks with the same quotas. `drawn[c]` samples of corpus c came before the segment."""

    start: int
    blocks: int | None
    quotas: tuple[int, ...]
    drawn: tuple[int, ...]

    @cached_property
    def block_size(self) -> int:
        return sum(self.quotas)

    @cached_property
    def stride(self) -> int:
        """A step that is coprime to the block's size and spreads consecutive positions evenly over its slots."""
        stride = max(1, round(self.block_size * _GOLDEN))
        while math.gcd(stride, self.block_size) != 1:
            stride += 1
        return stride

    @cached_property
    def slot_ends(self) -> list[int]:
        return list(accumulate(self.quotas))

    @property
    def stop(self) -> int | None:
        return None if self.blocks is None else self.start + self.blocks * self.block_size

    def drawn_before(self, index: int, corpus: int) -> int:
        """How many samples of `corpus` come before the global `index`, which lies in the segment or at its end."""
        block, position = divmod(index - self.start, self.block_size)
        quota, slot_end = self.quotas[corpus], self.slot_ends[corpus]
        earlier = self._count_below(slot_end, position) - self._count_below(
            slot_end - quota, position
        )
        return self.drawn[corpus] + block * quota + earlier

    def _count_below(self, slot: int, position: int) -> int:
        """How many of the first `position` positions of a block map to slots below `slot`.

        x mod n is below s where floor((x + n - s) / n) is floor(x / n), and one less than floor((x + n) / n).
        """
        size, stride = self.block_size, self.stride
        return floor_sum(position, size, stride, size) - floor_sum(
            position, size, stride, size - slot
        )


def _last_quotas(quotas: Sequence[int], left: Sequence[float]) -> list[int]:
    """The quotas, scaled down so that the corpus that ends first is exhausted."""
    scale, first = min((left[c] / quota, c) for c, quota in enumerate(quotas) if quota)
    last = [
        int(min(round(quota * scale), remaining))
        for quota, remaining in zip(quotas, left, strict=True)
    ]
    last[first] = int(left[first])
    return last


def _left(share: Share, drawn: int) -> float:
    return math.inf if share.budget is None else share.budget - drawn
