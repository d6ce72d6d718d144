"""Which tokens read what was added to the base, and which get what the base computes.

Training and exported models both use it: as `pipeline.scale_math`, a folder in the format `scale`
carries a copy of this file, which needs torch alone. `hf/remote_code/open_tokens.py` is a symbolic
link to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class OpenTokens(NamedTuple):
    """Which tokens read the differences that were added to the base: W12, low-rank differences,
    gains, rows.

    A closed token gets what the base computes, to the bit. All tokens are open in training, and
    none on the base's path; with a gate each token is open or closed.

    Attributes:
        none: whether no token is open. Differences are then not computed at all.
        closed: bool [B, S, 1], the closed tokens; None where all tokens are alike.
    """

    none: bool = False
    closed: Tensor | None = None

    def add(self, y: Tensor, difference: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """y + difference(*inputs), [..., D]; y alone for closed tokens."""
        if self.none:
            return y
        return self.choose(y, y + difference(*inputs))

    def choose(self, of_closed: Tensor, of_open: Tensor) -> Tensor:
        """`of_open` for open tokens, `of_closed` for the others, both [..., D]."""
        if self.none:
            return of_closed
        if self.closed is None:
            return of_open
        # Selected, not multiplied by 0 or 1: y + 0 · change would be NaN where change is infinite.
        return torch.where(self.closed, of_closed, of_open)

    def at(self, tokens: slice | Tensor) -> OpenTokens:
        """The same of some positions of the batch."""
        return self.mapped(lambda closed: closed[:, tokens])

    def like(self, y: Tensor) -> OpenTokens:
        """The same with a mask that goes with the rows of y: [B, S, ...] or [B · S, ...]."""
        if y.dim() == 2:
            return self.mapped(lambda closed: closed.reshape(-1, 1))
        ones = [1] * (y.dim() - 2)
        return self.mapped(lambda closed: closed.view(*closed.shape[:2], *ones))

    def to(self, device: torch.device) -> OpenTokens:
        """The same with a mask on `device`."""
        return self.mapped(lambda closed: closed.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> OpenTokens:
        """The same with its mask changed, if there is one."""
        if self.closed is None:
            return self
        return self._replace(closed=change(self.closed))


ALL_OPEN = OpenTokens()
NONE_OPEN = OpenTokens(none=True)


def choose_path(
    open_tokens: OpenTokens,
    preserved: tuple[Tensor, Tensor | None],
    adapted: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """The streams of each token's path. x: [B, S, D], x_up: [B, S, U].

    A closed token keeps the preserved x, and an x_up of zeros, which adds exactly nothing to its
    logits. Where the base ran alone, x_up is None.
    """
    x = open_tokens.choose(preserved[0], adapted[0])
    x_up = adapted[1]
    if x_up is None or open_tokens.closed is None:
        return x, x_up
    # `masked_fill` and not a product with 0, which keeps NaN and infinity.
    return x, x_up.masked_fill(open_tokens.closed, 0)
