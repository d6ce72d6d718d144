"""The order in which samples are drawn, as arithmetic.

It says which corpus comes at a global index, and in which random order its samples come.

A blend is made of blocks. In a block of `size` draws each corpus has a quota; position p of the
block maps to slot `p · g mod size`, where g is near size / golden ratio and coprime to size, and
each corpus owns consecutive slots, as many as its quota. So any run of consecutive draws, however
short, has nearly the right proportions. How often a corpus was drawn before is a count of lattice
points under a line, which needs no table and no pass over the block. When a corpus reaches its
budget, the others continue among themselves.
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
# Multiples of the golden ratio, modulo 1, lie more evenly at any number of them than those of other
# numbers do (Knuth, The Art of Computer Programming 3, section 6.4).
_GOLDEN = (math.sqrt(5) - 1) / 2
# Four rounds of random functions make a pseudorandom permutation (Luby and Rackoff, SIAM J. Comput.
# 1988). The hash is no random function, so there are a few more.
_ROUNDS = 6
_MASK_64 = 2**64 - 1


class Share(NamedTuple):
    """A corpus in a blend: its weight in its role, and its budget in samples (None: no end)."""

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
        fractions: the fraction of draws from the corpora of each role except `new`, which gets the
            rest; within a role the weights decide. The blend ends when every new corpus is
            exhausted.

    Attributes:
        total: the number of samples, or None if a new corpus is never exhausted.
    """

    def __init__(
        self, shares: Mapping[str, Share], fractions: Mapping[Role, float] | None = None
    ) -> None:
        self.names = list(shares)
        self._shares = list(shares.values())
        # Exact, so that what they leave to the new corpora is exact, too.
        self._fractions: dict[Role, Fraction] = {}
        for role, fraction in (fractions or {}).items():
            self._fractions[role] = Fraction(fraction).limit_denominator(BLOCK)
        self._segments = self._lay_out()
        self._starts = [segment.start for segment in self._segments]
        self.total = self._segments[-1].stop

    def __getitem__(self, index: int) -> Draw:
        """The draw at the global `index`.

        Raises:
            DataError: the blend ends before `index`.
            IndexError: `index` is below 0.
        """
        if index < 0:
            raise IndexError(f"global index {index} is below 0")
        if self.total is not None and index >= self.total:
            raise DataError(
                f"data: the corpora give {self.total} samples in all, but sample {index} was asked "
                "for; raise epochs or token_budget, or lower schedule.steps"
            )
        segment = self._segment(index)
        position = (index - segment.start) % segment.block_size
        # A bijection of the block, as the stride is coprime to its size.
        slot = position * segment.stride % segment.block_size
        corpus = bisect.bisect_right(segment.slot_ends, slot)
        return Draw(self.names[corpus], segment.drawn_before(index, corpus))

    def drawn_before(self, index: int) -> dict[str, int]:
        """How many of the draws before the global `index`, at most `total`, went to each corpus."""
        segment = self._segment(index)
        drawn: dict[str, int] = {}
        for corpus, name in enumerate(self.names):
            drawn[name] = segment.drawn_before(index, corpus)
        return drawn

    def _segment(self, index: int) -> _Segment:
        return self._segments[bisect.bisect_right(self._starts, index) - 1]

    def _lay_out(self) -> list[_Segment]:
        """The segments of the blend, at most two per corpus.

        Full blocks while budgets last, then a smaller one for the corpus that ends first.
        """
        segments: list[_Segment] = []
        start = 0
        drawn = [0] * len(self._shares)
        left = self._left(drawn)
        while self._has_new(left):
            quotas = self._quotas(left)
            blocks = _full_blocks(quotas, left)
            if blocks == 0:
                # The rest of a corpus is less than its quota: a smaller block uses it up.
                blocks = 1
                quotas = _last_quotas(quotas, left)
            segments.append(_Segment(start, blocks, tuple(quotas), tuple(drawn)))
            if blocks is None:
                # No corpus that is still drawn from has a budget: this segment has no end.
                break
            start += blocks * sum(quotas)
            for corpus, quota in enumerate(quotas):
                drawn[corpus] += blocks * quota
            left = self._left(drawn)
        return segments

    def _left(self, drawn: Sequence[int]) -> list[float]:
        """How many samples of each corpus are left after so many; infinity without a budget."""
        left: list[float] = []
        for share, used in zip(self._shares, drawn, strict=True):
            left.append(math.inf if share.budget is None else share.budget - used)
        return left

    def _has_new(self, left: Sequence[float]) -> bool:
        """Whether a new corpus is not exhausted. The blend ends with the last of them."""
        shares = zip(self._shares, left, strict=True)
        return any(share.role == "new" and remaining > 0 for share, remaining in shares)

    def _quotas(self, left: Sequence[float]) -> list[int]:
        """How many of BLOCK draws each corpus gets that is not exhausted.

        At least one if its share is not 0.
        """
        # An exhausted corpus leaves its draws to the others of its role.
        weights: dict[Role, float] = {}
        for share, remaining in zip(self._shares, left, strict=True):
            if remaining:
                weights[share.role] = weights.get(share.role, 0.0) + share.weight
        # A role whose corpora are all exhausted leaves its draws to the new ones.
        fractions: dict[Role, Fraction] = {}
        for role, fraction in self._fractions.items():
            if role in weights:
                fractions[role] = fraction
        fractions["new"] = 1 - sum(fractions.values(), Fraction(0))
        exact: list[float] = []
        for share, remaining in zip(self._shares, left, strict=True):
            of_block = 0.0
            if remaining:
                of_role = float(fractions.get(share.role, 0) * BLOCK)
                of_block = of_role * share.weight / weights[share.role]
            exact.append(of_block)
        return _rounded(exact)


class PassingBlend:
    """A blend whose proportions go along a line from those of `before` to those of `after`.

    The share of `after` in the samples around index i is i / length; from `length` on all are of
    `after`. So the first i samples hold i² / (2 · length) of it: sample i is of `after` where the
    whole part of that number rises. Each blend gives its own samples in their order. Both must be
    of the same corpora, in the same order.

    Attributes:
        total: the number of samples, or None for no end.
    """

    def __init__(self, before: Blend, after: Blend, length: int) -> None:
        assert before.names == after.names
        self.names = after.names
        self.before = before
        self.after = after
        self.length = length
        self.total = self._total()

    def __getitem__(self, index: int) -> Draw:
        """The draw at the global `index`.

        Raises:
            DataError: one of the blends ends before it.
            IndexError: `index` is below 0.
        """
        of_after = self._drawn_from_after(index)
        of_before = index - of_after
        if self._drawn_from_after(index + 1) > of_after:
            corpus, occurrence = self.after[of_after]
            others = self.before.drawn_before(of_before)
        else:
            corpus, occurrence = self.before[of_before]
            others = self.after.drawn_before(of_after)
        return Draw(corpus, occurrence + others[corpus])

    def drawn_before(self, index: int) -> dict[str, int]:
        """How many of the draws before the global `index`, at most `total`, went to each corpus."""
        of_after = self._drawn_from_after(index)
        drawn = self.after.drawn_before(of_after)
        for name, count in self.before.drawn_before(index - of_after).items():
            drawn[name] += count
        return drawn

    def _drawn_from_after(self, index: int) -> int:
        """How many of the first `index` samples are of the blend `after`."""
        passing = min(index, self.length)
        return passing * passing // (2 * self.length) + index - passing

    def _total(self) -> int | None:
        of_before = self.length - self._drawn_from_after(self.length)
        if self.before.total is not None and self.before.total < of_before:
            # It ends within the passage, at the latest after so many samples.
            return self.before.total
        if self.after.total is None:
            return None
        return self.after.total + of_before


def _rounded(exact: Sequence[float]) -> list[int]:
    """Whole numbers near `exact` that sum to BLOCK, by largest remainders.

    At least one where it is not 0.
    """
    quotas: list[int] = []
    for value in exact:
        quota = 0
        if value:
            # A tiny share is drawn now and then, rather than never. The sum may then be over BLOCK.
            quota = max(1, math.floor(value))
        quotas.append(quota)
    # The most negative difference first: the corpus that rounding has shortened most.
    by_remainder = sorted(range(len(exact)), key=lambda corpus: quotas[corpus] - exact[corpus])
    missing = max(0, BLOCK - sum(quotas))
    for corpus in by_remainder[:missing]:
        quotas[corpus] += 1
    return quotas


def _full_blocks(quotas: Sequence[int], left: Sequence[float]) -> int | None:
    """How many blocks with these quotas no corpus's rest ends.

    None if no corpus that is drawn from has a budget.
    """
    counts: list[int] = []
    for quota, remaining in zip(quotas, left, strict=True):
        if quota and remaining != math.inf:
            counts.append(int(remaining // quota))
    return min(counts, default=None)


def _last_quotas(quotas: Sequence[int], left: Sequence[float]) -> list[int]:
    """The quotas, scaled down so that the corpus that ends first is exhausted."""
    # The corpus that ends first has the least left, in parts of its quota.
    scale, first = min((left[c] / quota, c) for c, quota in enumerate(quotas) if quota)
    last: list[int] = []
    for quota, remaining in zip(quotas, left, strict=True):
        last.append(int(min(round(quota * scale), remaining)))
    # Rounding might leave one sample of it, and with it another segment.
    last[first] = int(left[first])
    return last


def tempered(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """A factor of each corpus's weight: (size / largest size) to the power of 1 / temperature.

    At 1 corpora are drawn in proportion to their sizes; the higher it is, the more evenly. See
    Conneau and Lample, "Cross-lingual Language Model Pretraining", NeurIPS 2019, whose alpha is 1 /
    temperature.
    """
    largest = max(sizes.values())
    return {name: (size / largest) ** (1 / temperature) for name, size in sizes.items()}


class Permutation:
    """A random permutation of range(size), which `key` determines.

    It is evaluated at one point in constant time.

    A Feistel network permutes 4**k values, slightly more than `size`; a value outside the range is
    permuted again until it falls inside ("cycle walking"), which keeps the map one-to-one. See
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        # Two halves of equally many bits: together they hold size - 1, and have at most 4 · size
        # values.
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [mix(*key, number) for number in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        """The image of `index`.

        Raises:
            IndexError: it is not in range(size).
        """
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside range({self.size})")
        # Cycle walking: fewer than four passes on average, as a pass permutes less than 4 · size
        # values, of which `size` are inside.
        value = self._once(index)
        while value >= self.size:
            value = self._once(value)
        return value

    def _once(self, value: int) -> int:
        """The Feistel network.

        Each round xors one half with a hash of the other, and swaps them.
        """
        left = value >> self._half_bits
        right = value & self._half_mask
        # left, right = right, left ^ F(right): invertible whatever F is, which makes it a
        # permutation.
        for key in self._round_keys:
            hashed = mix(right ^ key) & self._half_mask
            swapped = left ^ hashed
            left = right
            right = swapped
        return left << self._half_bits | right


def mix(*values: int) -> int:
    """A 64-bit hash of integers.

    The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), chained.
    """
    # The odd number nearest to 2**64 / golden ratio, and multipliers found by search (Stafford's
    # variant 13 of MurmurHash3's finalizer).
    state = 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK_64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK_64
        state ^= state >> 31
    return state


def floor_sum(count: int, modulus: int, factor: int, offset: int) -> int:
    """The sum of floor((factor · k + offset) / modulus) over k in range(count).

    As Euclid's algorithm, in a number of steps that grows with the logarithm of the modulus.
    """
    total = 0
    while count > 0:
        # The whole parts of the slope and of the offset: a triangle and a rectangle of lattice
        # points.
        total += count * (count - 1) // 2 * (factor // modulus)
        total += count * (offset // modulus)
        factor %= modulus
        offset %= modulus
        # What is left lies under a line of slope below 1: count its lattice points along the other
        # axis.
        count, offset = divmod(factor * count + offset, modulus)
        factor, modulus = modulus, factor
    return total


@dataclass(frozen=True)
class _Segment:
    """`blocks` blocks with the same quotas (None: without end).

    `drawn[c]` samples of corpus c came before.
    """

    start: int
    blocks: int | None
    quotas: tuple[int, ...]
    drawn: tuple[int, ...]

    @cached_property
    def block_size(self) -> int:
        return sum(self.quotas)

    @cached_property
    def stride(self) -> int:
        """A step, coprime to the block's size, that spreads positions evenly over the slots."""
        # The next coprime number is near: gaps between numbers coprime to n are O(log(n)**2).
        # The three-distance theorem: multiples of the golden ratio leave gaps of at most three
        # sizes, all near to each other.
        stride = max(1, round(self.block_size * _GOLDEN))
        while math.gcd(stride, self.block_size) != 1:
            stride += 1
        return stride

    @cached_property
    def slot_ends(self) -> list[int]:
        """The slot at which the slots of each corpus end."""
        return list(accumulate(self.quotas))

    @property
    def stop(self) -> int | None:
        """The global index at which the segment ends; None if it has no end."""
        if self.blocks is None:
            return None
        return self.start + self.blocks * self.block_size

    def drawn_before(self, index: int, corpus: int) -> int:
        """How many samples of `corpus` come before `index`, in the segment or at its end."""
        block, position = divmod(index - self.start, self.block_size)
        quota = self.quotas[corpus]
        slot_end = self.slot_ends[corpus]
        before_end = self._count_below(slot_end, position)
        before_first = self._count_below(slot_end - quota, position)
        return self.drawn[corpus] + block * quota + before_end - before_first

    def _count_below(self, slot: int, position: int) -> int:
        """How many of the first `position` positions of a block map to slots below `slot`.

        With n the block's size and x = p · stride: x mod n is below s where floor((x + n - s) / n)
        is floor(x / n), which is one less than floor((x + n) / n). So the count is the sum of the
        differences of these two.
        """
        size = self.block_size
        upper = floor_sum(position, size, self.stride, size)
        lower = floor_sum(position, size, self.stride, size - slot)
        return upper - lower
