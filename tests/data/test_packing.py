"""A sample shows each token once, predicts the right ones, and keeps documents apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.packing import IGNORED, PackedCorpus

PADDING = 0


class Documents:
    """A token source over documents in memory; all tokens of the corpus are different."""

    def __init__(self, lengths: list[int], prompt_lengths: list[int] | None = None) -> None:
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


def test_a_document_sees_the_end_of_the_one_before_it_where_no_start_token_does():
    # Documents 1 2 3 | 4 5 | 6 7 8 end in 3, 5 and 8: tokens 3 and 5 are also the first that 4 and 6 see.
    first, second = PackedCorpus(Documents([3, 2, 3]), 5, padding=PADDING, document_mask=True, begins_with_end=True)
    assert list(first.tokens) == [1, 2, 3, 4, 5]
    assert list(first.targets) == [2, 3, 4, 5, 6]
    assert list(first.positions) == [0, 1, 0, 1, 0]
    assert list(first.document_ids) == [0, 0, 1, 1, 2]
    assert list(second.tokens) == [6, 7, 8, PADDING, PADDING]
    assert list(second.targets) == [7, 8, IGNORED, IGNORED, IGNORED]
    assert list(second.document_ids) == [0, 0, 0, 1, 1]
    # With prompts: 1 [2] | 3 [4 5]. The end is read again where a sample begins with a document.
    source = Documents([2, 3], [1, 1])
    whole = PackedCorpus(source, 4, padding=PADDING, document_mask=True, whole_documents=True, begins_with_end=True)
    assert [list(sample.tokens) for sample in whole] == [[1, 2, PADDING, PADDING], [2, 3, 4, 5]]
    assert [list(sample.targets) for sample in whole] == [[2, *[IGNORED] * 3], [IGNORED, 4, 5, IGNORED]]
    assert list(whole[1].answer_starts) == [False, True, False, False]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(2, 17), st.booleans())
def test_after_another_documents_end_every_token_but_the_first_is_predicted_once(lengths, length, whole):
    corpus = PackedCorpus(
        Documents(lengths), length, padding=PADDING, document_mask=True, whole_documents=whole, begins_with_end=True
    )
    targets = np.concatenate([sample.targets for sample in corpus])
    assert list(targets[targets != IGNORED]) == list(range(2, sum(lengths) + 1))
    for sample in corpus:
        at = np.flatnonzero(sample.targets != IGNORED)
        assert np.array_equal(sample.targets[at], sample.tokens[at] + 1)
        assert np.all(sample.positions[at[np.isin(sample.tokens[at], np.cumsum(lengths))]] == 0)


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
    # Everything is predicted except the first token of each text: that of a document, or of the corpus.
    firsts = np.cumsum([0, *lengths])[:-1] + 1 if mask else [1]
    assert predicted == [token for token in read if token not in firsts]


def prompted(documents: list[tuple[int, int]], sequence_length: int, document_mask: bool = True) -> PackedCorpus:
    """Documents of (prompt, answer) tokens."""
    source = Documents([prompt + answer for prompt, answer in documents], [prompt for prompt, _ in documents])
    return PackedCorpus(source, sequence_length, padding=PADDING, document_mask=document_mask, whole_documents=True)


def test_samples_of_prompts_and_answers_by_hand():
    # 1 2 [3 4] | 5 [6] | 7 8 [9 10 11 12 13 14] in samples of five: the second document does not fit into the first.
    first, second, third, fourth = prompted([(2, 2), (1, 1), (2, 6)], 5)
    assert list(first.tokens) == [1, 2, 3, 4, PADDING]
    assert list(first.targets) == [IGNORED, 3, 4, IGNORED, IGNORED]
    assert list(first.answer_starts) == [False, True, False, False, False]
    assert list(second.tokens) == [5, 6, PADDING, PADDING, PADDING]
    assert list(second.targets) == [6, IGNORED, IGNORED, IGNORED, IGNORED]
    assert list(second.answer_starts) == [True, False, False, False, False]
    # Longer than a sample: it starts a new one; its continuation in the next is not the beginning of an answer.
    assert list(third.tokens) == [7, 8, 9, 10, 11]
    assert list(third.targets) == [IGNORED, 9, 10, 11, 12]
    assert list(third.answer_starts) == [False, True, False, False, False]
    assert list(fourth.targets) == [13, 14, IGNORED, IGNORED, IGNORED]
    assert not fourth.answer_starts.any()


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=20),
    st.integers(1, 17),
    st.booleans(),
)
def test_every_answer_is_predicted_once_and_stays_with_its_prompt(
    documents: list[tuple[int, int]], length: int, mask: bool
):
    corpus = prompted(documents, length, mask)
    source = corpus.source
    read, predicted, begun = [], [], []
    for sample in (corpus[number] for number in range(len(corpus))):
        read += list(sample.tokens[sample.tokens != PADDING])
        at = np.flatnonzero(sample.targets != IGNORED)
        assert np.array_equal(sample.targets[at], sample.tokens[at] + 1)
        predicted += list(sample.targets[at])
        begun += list(sample.targets[sample.answer_starts])
    assert read == list(range(1, source.tokens + 1))
    answers = np.flatnonzero(~source.prompts) + 1
    assert predicted == list(answers)
    assert begun == [start + prompt + 1 for start, (prompt, _) in zip(source.starts, documents, strict=True)]
    cuts = {0} | {int(corpus[number].tokens[0]) - 1 for number in range(len(corpus))}
    whole = [(start, sum(size)) for start, size in zip(source.starts, documents, strict=True) if sum(size) <= length]
    assert not [start for start, size in whole if any(start < cut < start + size for cut in cuts)]
