"""Which ids a gate opens whatever their score: those that new text has and old text never has."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

UNSEEN_COUNT = 3.0
"""What does not occur among N tokens has a share below UNSEEN_COUNT / N of such text, with a
confidence of 95 %: (1 - 3 / N) ** N is e ** -3. (The rule of three: Hanley and Lippman-Hand 1983.)
"""

Counts = npt.NDArray[np.int64]
"""How often each id occurs: [V]."""


class OpenIds(NamedTuple):
    """The ids that a gate opens.

    Attributes:
        ids: in ascending order.
        of_new: their share of the tokens of the new text.
        of_old: an estimate of their share of old text that was not read.
    """

    ids: tuple[int, ...]
    of_new: float
    of_old: float


NO_OPEN_IDS = OpenIds((), 0.0, 0.0)


def choose_open_ids(new: Counts, old: Counts, *, min_count: int, never: frozenset[int]) -> OpenIds:
    """The ids that new text has often, and that old text never has.

    Often means at least `min_count` times, and with a larger share of the new text than ids may
    have in old text without occurring in what was read of it: so no id opens only because little
    old text was read, or very much new text.

    Args:
        new: the counts of the new text.
        old: the counts of the old text.
        min_count: how often an id must occur in the new text.
        never: ids that are not opened, such as special tokens.
    """
    read_of_new = max(1, int(new.sum()))
    read_of_old = max(1, int(old.sum()))
    is_candidate = (new >= min_count) & (new / read_of_new > UNSEEN_COUNT / read_of_old)
    is_candidate[[token for token in never if token < len(new)]] = False
    is_open = is_candidate & (old == 0)
    # Good and Turing's estimate: what never occurred has the share of what occurred once.
    once = int((is_candidate & (old == 1)).sum())
    return OpenIds(
        ids=tuple(np.flatnonzero(is_open).tolist()),
        of_new=int(new[is_open].sum()) / read_of_new,
        of_old=once / read_of_old,
    )
