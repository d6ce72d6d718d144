"""The windows that a gate is fitted on."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.packing import pack
from pipeline.gating.windows import as_windows, joined, spliced

LENGTH = 16
PADDING = 0


def sample(tokens: int, starts: list[int], first: int):
    """A sample of `tokens` tokens from `first` on, in which documents begin at `starts`."""
    window = np.arange(first, first + tokens, dtype=np.int64)
    return pack(window, np.array(sorted(starts), dtype=np.int64), LENGTH, padding=PADDING)


@given(tokens=st.integers(2, LENGTH + 1), starts=st.sets(st.integers(1, LENGTH), max_size=3))
def test_padding_is_not_present(tokens, starts):
    starts = {start for start in starts if start < min(tokens, LENGTH) - 1}
    window = as_windows([sample(tokens, list(starts), first=100)], is_new=True)
    assert window.present.sum() == min(tokens, LENGTH)
    assert (window.tokens[window.present] >= 100).all() and (window.tokens[~window.present] == PADDING).all()
    assert window.is_new.all()


@given(
    starts=st.lists(st.sets(st.integers(1, LENGTH - 1), max_size=3), min_size=4, max_size=4), seed=st.integers(0, 50)
)
def test_a_splice_continues_one_document_with_text_of_the_other_kind(starts, seed):
    old = as_windows([sample(LENGTH + 1, list(own), first=100) for own in starts[:2]], is_new=False)
    new = as_windows([sample(LENGTH + 1, list(own), first=200) for own in starts[2:]], is_new=True)
    found = spliced(old, new, seed)
    assert len(found) == 2
    for row, (first, second) in enumerate([(old, new), (new, old)]):
        changes = (found.is_new[row].diff() != 0).nonzero().flatten()
        assert len(changes) == 1 and found.is_new[row, 0] == first.is_new[0, 0]
        cut = int(changes[0]) + 1
        assert LENGTH // 4 <= cut < 3 * LENGTH // 4
        assert torch.equal(found.tokens[row], torch.cat([first.tokens[row, :cut], second.tokens[row, cut:]]))
        ids, positions = found.document_ids[row], found.positions[row]
        assert ids[cut] == ids[cut - 1] and positions[cut] == positions[cut - 1] + 1
        assert (ids.diff() >= 0).all()
        begins = torch.cat([torch.ones(1, dtype=torch.bool), ids.diff() > 0])
        assert (positions[begins] == 0).all() and (positions.diff()[~begins[1:]] == 1).all()
    assert torch.equal(spliced(old, new, seed).tokens, found.tokens)


def test_documents_that_the_base_wrote_in_the_new_kind_are_left_out():
    own = as_windows([sample(LENGTH + 1, [6], first=100), sample(10, [], first=200)], is_new=False, is_own=True)
    given = as_windows([sample(LENGTH + 1, [6], first=300)], is_new=False)
    windows = joined([own, given])
    is_open = torch.zeros_like(windows.present)
    is_open[:, 6:12] = True  # six of the ten tokens of the second documents; four of the ten of the short sample
    is_open[:, 2] = True
    kept = windows.without_new_kind(is_open)
    expected = windows.present.clone()
    expected[0, 6:] = False
    assert torch.equal(kept.present, expected)
    assert torch.equal(kept.tokens, windows.tokens)
