"""The widths of the ordinary model that a widened one becomes, padded with zeros to what its servers can split.

A zero head attends to zero values, a zero channel is multiplied by zero: outputs stay equal to the last bit of the sums
that matter. Only time and memory grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.scale.plan import Widths

_GGUF_BLOCK = 256
"""The elements of a row that GGUF's K-quants need a multiple of."""


@dataclass(frozen=True)
class Padding:
    """What a server needs: heads and channels that `tp` ranks split evenly, rows of `row_multiple` elements."""

    tp: int = 1
    row_multiple: int = 1

    @classmethod
    def parse(cls, text: str) -> Padding:
        """Reads `tp=8`, `gguf`, or both with a comma between them.

        Raises:
            ValueError: it is something else.
        """
        tp, row_multiple = 1, 1
        for need in text.split(","):
            name, _, number = need.strip().partition("=")
            if name == "tp" and number.isdecimal() and 1 <= int(number) <= 1024:
                tp = int(number)
            elif need.strip() == "gguf":
                row_multiple = _GGUF_BLOCK
            else:
                raise ValueError(f"{need.strip()!r}: expected tp=<ranks> or gguf")
        return cls(tp, row_multiple)


UNPADDED = Padding()


def padded_widths(widths: Widths, head_dim: int, padding: Padding, *, derives_head_dim: bool) -> Widths:
    """The widths with the fewest parameters from `widths` on that fit `padding`.

    hidden_size is a multiple of the heads, as transformers requires, and heads · head_dim where servers derive the size
    of a head from it. Query heads stay the same multiple of key/value heads.
    """
    group = widths.num_attention_heads // widths.num_key_value_heads
    least = widths.num_key_value_heads
    if derives_head_dim:
        least = max(least, -(-widths.hidden_size // (group * head_dim)))

    def fitted(kv_heads: int) -> Widths:
        heads = group * kv_heads
        row = head_dim * heads if derives_head_dim else math.lcm(heads, padding.row_multiple)
        return Widths(
            hidden_size=_up_to_multiple(widths.hidden_size, row),
            intermediate_size=_up_to_multiple(widths.intermediate_size, math.lcm(padding.tp, padding.row_multiple)),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
        )

    def fits(found: Widths) -> bool:
        heads, kv_heads, tp = found.num_attention_heads, found.num_key_value_heads, padding.tp
        rows = (found.hidden_size, head_dim * heads)
        splits = heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
        return splits and all(row % padding.row_multiple == 0 for row in rows)

    def parameters(found: Widths) -> int:
        heads = 2 * head_dim * (found.num_attention_heads + found.num_key_value_heads)
        return found.hidden_size * (heads + 3 * found.intermediate_size)

    # Among so many successive numbers of heads is a multiple of all that is needed.
    candidates = map(fitted, range(least, least + padding.tp * padding.row_multiple))
    return min(filter(fits, candidates), key=parameters)


def _up_to_multiple(size: int, of: int) -> int:
    return -(-size // of) * of
