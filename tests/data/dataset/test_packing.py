"""A sample shows each token once, predicts the right ones, and keeps documents apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.dataset.packing import IGNORED, PackedCorpus

PADDING = 0
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=20)


class Documents:
    """A token source over documents in memory; all tokens of the corpus are different."""

    def __init__(self, lengths: Sequence[int], prompt_lengths: Sequence[int] | None = None) -> None:
        self.tokens = sum(lengths)
        self.starts = np.cumsum([0, *lengths])[:-1]
        self.prompts: np.ndarray | None = None
        if prompt_lengths is not None:
            runs = zip(lengths, prompt_lengths, strict=True)
            self.prompts = np.concatenate([np.arange(length) < prompt for length, prompt in runs])

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) + 1

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        return self.starts[(self.starts >= start) & (self.starts < stop)]

    def prompt_mask(self, start: int, stop: int) -> np.ndarray | None:
        return None if self.prompts is None else self.prompts[start:stop]


def packed(
    source: Documents, length: int, *, mask: bool = True, whole: bool = False, end: bool = False
):
    return PackedCorpus(
        source,
        length,
        padding=PADDING,
        document_mask=mask,
        whole_documents=whole,
        begins_with_end=end,
    )


def rows(corpus: PackedCorpus, name: str) -> list[list[int]]:
    """An array of every sample, as lists."""
    return [getattr(sample, name).astype(int).tolist() for sample in corpus]


_ = IGNORED
"""So that targets that are not predicted read as blanks."""


def test_samples_by_hand():
    # Documents 1 2 3 | 4 5 | 6 7 8 in samples of five.
    corpus = packed(Documents([3, 2, 3]), 5)
    assert rows(corpus, "tokens") == [[1, 2, 3, 4, 5], [6, 7, 8, PADDING, PADDING]]
    assert rows(corpus, "targets") == [[2, 3, _, 5, _], [7, 8, _, _, _]]
    assert rows(corpus, "positions") == [[0, 1, 2, 0, 1]] * 2
    assert rows(corpus, "document_ids") == [[0, 0, 0, 1, 1]] * 2


def test_a_document_sees_the_end_of_the_one_before_it_where_no_start_token_does():
    # Documents 1 2 3 | 4 5 | 6 7 8 end in 3, 5 and 8: tokens 3 and 5 are also the first that 4 and
    # 6 see.
    corpus = packed(Documents([3, 2, 3]), 5, end=True)
    assert rows(corpus, "tokens") == [[1, 2, 3, 4, 5], [6, 7, 8, PADDING, PADDING]]
    assert rows(corpus, "targets") == [[2, 3, 4, 5, 6], [7, 8, _, _, _]]
    assert rows(corpus, "positions")[0] == [0, 1, 0, 1, 0]
    assert rows(corpus, "document_ids") == [[0, 0, 1, 1, 2], [0, 0, 0, 1, 1]]
    # With prompts: 1 [2] | 3 [4 5]. The end is read again where a sample begins with a document.
    corpus = packed(Documents([2, 3], [1, 1]), 4, whole=True, end=True)
    assert rows(corpus, "tokens") == [[1, 2, PADDING, PADDING], [2, 3, 4, 5]]
    assert rows(corpus, "targets") == [[2, _, _, _], [_, 4, 5, _]]
    assert rows(corpus, "answer_starts")[1] == [False, True, False, False]


def test_samples_of_prompts_and_answers_by_hand():
    # 1 2 [3 4] | 5 [6] | 7 8 [9 10 11 12 13 14] in samples of five: the second document does not
    # fit into the first.
    corpus = packed(Documents([4, 2, 8], [2, 1, 2]), 5, whole=True)
    assert rows(corpus, "tokens")[:3] == [
        [1, 2, 3, 4, PADDING],
        [5, 6, *[PADDING] * 3],
        [7, 8, 9, 10, 11],
    ]
    # Longer than a sample: it starts a new one; its continuation in the next is not the beginning
    # of an answer.
    assert rows(corpus, "targets") == [
        [_, 3, 4, _, _],
        [6, _, _, _, _],
        [_, 9, 10, 11, 12],
        [13, 14, _, _, _],
    ]
    begun = [np.flatnonzero(sample.answer_starts).tolist() for sample in corpus]
    assert begun == [[1], [0], [1], []]


def predicted(corpus: PackedCorpus) -> list[int]:
    """The targets in order; each is the token after the one it is predicted from."""
    targets: list[int] = []
    for sample in corpus:
        at = sample.targets != IGNORED
        assert np.array_equal(sample.targets[at], sample.tokens[at] + 1)
        targets += sample.targets[at].tolist()
    return targets


@given(LENGTHS, st.integers(2, 17), st.booleans())
def test_after_another_documents_end_every_token_but_the_first_is_predicted_once(
    lengths, length, whole
):
    corpus = packed(Documents(lengths), length, whole=whole, end=True)
    assert predicted(corpus) == list(range(2, sum(lengths) + 1))
    ends = np.cumsum(lengths)  # tokens are numbered: these are the documents' last ones
    for sample in corpus:
        is_end = np.isin(sample.tokens, ends)
        predicts = sample.targets != IGNORED
        assert np.all(sample.positions[is_end & predicts] == 0), "it begins the next document"


@given(LENGTHS, st.integers(1, 17), st.booleans())
def test_every_token_is_read_once_and_predicted_from_its_own_document(
    lengths: list[int], length: int, mask: bool
):
    corpus = packed(Documents(lengths), length, mask=mask)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    read: list[int] = []
    for sample in corpus:
        real = sample.tokens != PADDING
        read += list(sample.tokens[real])
        assert np.all(sample.targets[~real] == IGNORED)
        if mask:
            documents = document_of[sample.tokens[real] - 1]
            assert np.array_equal(np.diff(documents) != 0, np.diff(sample.document_ids[real]) != 0)
            at = sample.targets != IGNORED
            assert np.array_equal(
                document_of[sample.targets[at] - 1], document_of[sample.tokens[at] - 1]
            )
        assert np.all(sample.document_ids[~real] > sample.document_ids[real].max(initial=-1))
        new = np.diff(sample.document_ids, prepend=-1) != 0
        assert np.array_equal(sample.positions == 0, new)
        assert np.all(np.diff(sample.positions)[~new[1:]] == 1)
    assert read == list(range(1, sum(lengths) + 1))
    # Everything is predicted except the first token of each text: that of a document, or, where
    # attention crosses documents, of the corpus.
    first_tokens = [1]
    if mask:
        first_tokens = np.cumsum([0, *lengths])[:-1] + 1
    assert predicted(corpus) == [token for token in read if token not in first_tokens]


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=20),
    st.integers(1, 17),
    st.booleans(),
)
def test_every_answer_is_predicted_once_and_stays_with_its_prompt(pairs, length, mask):
    prompt_lengths = [prompt for prompt, _ in pairs]
    source = Documents([prompt + answer for prompt, answer in pairs], prompt_lengths)
    corpus = packed(source, length, mask=mask, whole=True)

    # Every token is read once; those of answers are predicted once, and begin where they should.
    read: list[int] = []
    begun: list[int] = []
    cuts: list[int] = []
    for sample in corpus:
        read += sample.tokens[sample.tokens != PADDING].tolist()
        begun += sample.targets[sample.answer_starts].tolist()
        # Tokens are numbered from 1: this is the place in the source where the sample begins.
        cuts.append(int(sample.tokens[0]) - 1)
    assert read == list(range(1, source.tokens + 1))
    assert predicted(corpus) == list(np.flatnonzero(~source.prompts) + 1)
    answer_places = source.starts + np.array(prompt_lengths)
    assert begun == list(answer_places + 1)

    # A document that fits into a sample is not cut.
    for start, pair in zip(source.starts, pairs, strict=True):
        end = start + sum(pair)
        if end - start <= length:
            assert not any(start < cut < end for cut in cuts)
