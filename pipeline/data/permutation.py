"""Random order as arithmetic: a keyed permutation of range(size), evaluated at one point in constant time.

A Feistel network permutes a domain of 4**k values, a little larger than `size`; values that fall outside are sent
through again ("cycle walking") until they land inside, which keeps the map one to one. See Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002.
"""

from __future__ import annotations

_ROUNDS = 6
_MASK_64 = 2**64 - 1


def mix(*values: int) -> int:
    """A 64-bit hash of integers (the finaliser of SplitMix64, chained)."""
    state = 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK_64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK_64
        state ^= state >> 31
    return state


class Permutation:
    """A permutation of range(size) chosen by `key`."""

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [mix(*key, number) for number in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        """Where `index` goes.

        Raises:
            IndexError: it is not in range(size).
        """
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
