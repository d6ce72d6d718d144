"""A sample shows each token once, predicts the right ones, and keeps documents apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.packing import IGNORED, pack
from pipeline.data.token_corpus import PackedCorpus

PADDING = 0


class Documents:
    """A token source over documents in memory; every token of the corpus is another number."""

    def __init__(self, lengths: list[int]) -> None:
        self.tokens = sum(lengths)
        self.starts = np.cumsum([0, *lengths])[:-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) + 1

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        return self.starts[(self.starts >= start) & (self.starts < stop)]


def packed(lengths: list[int], sequence_length: int, document_mask: bool = True) -> PackedCorpus:
    return PackedCorpus(Documents(lengths), sequence_length, padding=PADDING, document_mask=document_mask)


def test_a_sample_by_hand():
    # Documents 1 2 3 | 4 5 | 6 7 8 in samples of five.
    first, second = packed([3, 2, 3], 5)
    assert list(first.tokens) == [1, 2, 3, 4, 5]
    assert list(first.targets) == [2, 3, IGNORED, 5, IGNORED]
    assert list(first.positions) == [0, 1, 2, 0, 1]
    assert list(first.document_ids) == [0, 0, 0, 1, 1]
    assert list(second.tokens) == [6, 7, 8, PADDING, PADDING]
    assert list(second.targets) == [7, 8, IGNORED, IGNORED, IGNORED]
    assert list(second.positions) == [0, 1, 2, 0, 1]
    assert list(second.document_ids) == [0, 0, 0, 1, 1]


def test_without_document_mask_it_is_one_run_of_text():
    first, second = packed([3, 2, 3], 5, document_mask=False)
    assert list(first.targets) == [2, 3, 4, 5, 6]
    assert list(first.positions) == [0, 1, 2, 3, 4]
    assert list(first.document_ids) == [0] * 5
    assert list(second.targets) == [7, 8, IGNORED, IGNORED, IGNORED]
    assert list(second.document_ids) == [0, 0, 0, 1, 1]


def test_the_token_after_the_sample_is_its_last_target():
    first, second = packed([10], 5)
    assert list(first.targets) == [2, 3, 4, 5, 6]
    assert list(second.targets) == [7, 8, 9, 10, IGNORED]
    assert list(second.positions) == [0, 1, 2, 3, 4]


def test_arrays_are_int64():
    sample = pack(np.arange(4, dtype=np.uint16), np.array([0]), 8, padding=0, document_mask=True)
    assert {array.dtype for array in sample} == {np.dtype(np.int64)}
    assert {array.shape for array in sample} == {(8,)}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 17), st.booleans())
def test_every_token_is_read_once_and_predicted_from_its_own_document(lengths: list[int], length: int, mask: bool):
    corpus = packed(lengths, length, mask)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    read, predicted = [], []
    for sample in (corpus[number] for number in range(len(corpus))):
        real = sample.tokens != PADDING
        read += list(sample.tokens[real])
        assert np.all(sample.targets[~real] == IGNORED)
        at = np.flatnonzero(sample.targets != IGNORED)
        assert np.array_equal(sample.targets[at], sample.tokens[at] + 1)
        predicted += list(sample.targets[at])
        if mask:
            documents = document_of[sample.tokens[real] - 1]
            assert np.array_equal(np.diff(documents) != 0, np.diff(sample.document_ids[real]) != 0)
            assert np.array_equal(document_of[sample.targets[at] - 1], document_of[sample.tokens[at] - 1])
        assert np.all(sample.document_ids[~real] > sample.document_ids[real].max(initial=-1))
        new = np.diff(sample.document_ids, prepend=-1) != 0
        assert np.array_equal(sample.positions == 0, new)
        assert np.all(np.diff(sample.positions)[~new[1:]] == 1)
    assert read == list(range(1, sum(lengths) + 1))
    # Everything is predicted except what nothing comes before: the first token of a document, or of the corpus.
    firsts = np.cumsum([0, *lengths])[:-1] + 1 if mask else [1]
    assert predicted == [token for token in read if token not in firsts]
