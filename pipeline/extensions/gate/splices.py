"""Windows that are spliced of new and other text."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.extensions.gate.windows import Windows, joined


def spliced(old: Windows, new: Windows, seed: int) -> Windows:
    """Windows whose text changes in the middle of a document: from old to new, or from new to old.

    Window i is window i of the one text up to the change, and window i of the other from there on;
    the first text is old in even windows. The place of the change is random in the middle half of a
    window. One document goes on across it.
    """
    # numpy's generator gives the same numbers on every platform and device.
    random = np.random.default_rng(seed)
    length = old.tokens.shape[1]
    windows = []
    for index in range(min(len(old), len(new))):
        # Both kinds of text must be long enough for a running mean to settle.
        cut = int(random.integers(max(1, length // 4), max(2, 3 * length // 4)))
        row = slice(index, index + 1)
        if index % 2 == 0:
            windows.append(_splice(old.rows(row), new.rows(row), cut))
        else:
            windows.append(_splice(new.rows(row), old.rows(row), cut))
    return joined(windows)


def _splice(first: Windows, second: Windows, cut: int) -> Windows:
    """One window: `first` [1, S] up to the token `cut`, and `second` [1, S] from there on."""

    def both(name: str) -> Tensor:
        return torch.cat([getattr(first, name)[:, :cut], getattr(second, name)[:, cut:]], dim=1)

    # The document that `second` is in at the cut continues the one that `first` is in there, with
    # its number and its positions; later documents of `second` keep their positions.
    before = first.document_ids[:, :cut]
    after = second.document_ids[:, cut:]
    positions = second.positions[:, cut:].clone()
    continues = after == after[:, :1]
    positions[continues] += first.positions[0, cut - 1] + 1 - positions[0, 0]
    is_new = both("is_new")
    return Windows(
        tokens=both("tokens"),
        targets=both("targets"),
        positions=torch.cat([first.positions[:, :cut], positions], dim=1),
        document_ids=torch.cat([before, after - after[:, :1] + before[:, -1:]], dim=1),
        is_new=is_new,
        # Such a document is of both kinds, and none is left out.
        is_self_generated=torch.zeros_like(is_new),
        present=both("present"),
        kinds=both("kinds"),
    )
