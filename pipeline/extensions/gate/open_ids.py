"""Which ids a gate opens whatever their score: those that new text has and old text does not."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

UNSEEN_COUNT = 3.0
"""What does not occur among N tokens has a share below UNSEEN_COUNT / N of such text, with a
confidence of 95 %: (1 - 3 / N) ** N is e ** -3. (The rule of three: Hanley and Lippman-Hand 1983.)
"""
RATIO = 100.0
"""By how much an id's share of new text must be larger than its share of old text."""

Counts = npt.NDArray[np.int64]
"""How often each id occurs: [V]."""


class OpenIds(NamedTuple):
    """The ids that a gate opens.

    Attributes:
        ids: in ascending order.
        of_new: their share of the tokens of the new text.
        of_old: their share of the tokens of the old text that was read.
    """

    ids: tuple[int, ...]
    of_new: float
    of_old: float


NO_OPEN_IDS = OpenIds((), 0.0, 0.0)


def choose_open_ids(new: Counts, old: Counts, *, min_count: int, never: frozenset[int]) -> OpenIds:
    """The ids that new text has often, and old text hardly ever.

    An id opens if all three hold:

    - it occurs at least `min_count` times in the new text;
    - its share of the new text is above UNSEEN_COUNT / N, where N tokens of old text were read: an
      id with a smaller share of old text may be absent from them by chance;
    - its share of the new text is above RATIO times its share of the old text that was read.

    So no id opens only because little old text was read, or very much new text. And a word of the
    new language that the base once wrote in other text does not keep its id closed.

    Args:
        new: the counts of the new text.
        old: the counts of the old text.
        min_count: how often an id must occur in the new text.
        never: ids that are not opened, such as special tokens.
    """
    read_of_new = max(1, int(new.sum()))
    read_of_old = max(1, int(old.sum()))
    # Both limits on the share at once: RATIO * old / N, and UNSEEN_COUNT / N for rare ids.
    least_share = np.maximum(UNSEEN_COUNT, RATIO * old) / read_of_old
    is_open = (new >= min_count) & (new / read_of_new > least_share)
    is_open[[token for token in never if token < len(new)]] = False
    return OpenIds(
        ids=tuple(np.flatnonzero(is_open).tolist()),
        of_new=int(new[is_open].sum()) / read_of_new,
        of_old=int(old[is_open].sum()) / read_of_old,
    )
