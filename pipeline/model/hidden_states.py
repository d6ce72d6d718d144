"""The last hidden states of a decoder: what the output projection reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from pipeline.open_tokens import ALL_OPEN, OpenTokens


@dataclass(frozen=True)
class HiddenStates:
    """The normalised hidden states after the last layer, one row for each of the N tokens of a
    batch.

    Attributes:
        x: [N, D], the base stream.
        x_up: [N, U], the expansion stream; None for a model, or a path, that has none.
        preserved_x, preserved_x_up: the two streams of Route's preserved path; x and x_up are then
            the adapted path's.
        reference: [R, D], the base's own hidden states for the first R tokens, for KL(base ||
            model).
        open_tokens: the tokens that read own output rows; its mask is [N, 1]. No new token may
            follow one that a gate closed.
    """

    x: Tensor
    x_up: Tensor | None = None
    preserved_x: Tensor | None = None
    preserved_x_up: Tensor | None = None
    reference: Tensor | None = None
    open_tokens: OpenTokens = ALL_OPEN

    def rows(self, rows: slice | Tensor) -> HiddenStates:
        """The hidden states of some of the tokens, without `reference`."""
        # `reference` has rows for the first tokens only, so that `rows` would mean others in it.
        return replace(self, reference=None)._mapped(lambda states: states[rows])

    def one_token_a_row(self) -> HiddenStates:
        """The same where the states of a batch are [B, S, ...]: joined to [B·S, ...]."""
        return self._mapped(lambda states: states.flatten(0, 1))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> HiddenStates:
        """The same with every tensor changed."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            states = getattr(self, field.name)
            if isinstance(states, Tensor):
                changed[field.name] = change(states)
            elif isinstance(states, OpenTokens):
                changed[field.name] = states.mapped(change)
        return replace(self, **changed)
