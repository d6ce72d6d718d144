"""Windows over a document: every token is scored exactly once, with the context that the docstring promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.perplexity import windows


@st.composite
def cuts(draw):
    context = draw(st.integers(2, 40))
    return draw(st.integers(1, 200)), context, draw(st.integers(1, context - 1))


@given(cuts())
def test_every_token_but_the_first_is_scored_once_and_in_order(cut):
    length, context, stride = cut
    scored = [token for window in windows(length, context, stride) for token in range(window.first_scored, window.stop)]
    assert scored == list(range(1, length))


@given(cuts(), st.integers(1, 80))
def test_tokens_before_the_first_scored_are_not_scored(cut, first_scored):
    length, context, stride = cut
    found = list(windows(length, context, stride, first_scored))
    assert [token for window in found for token in range(window.first_scored, window.stop)] == list(
        range(first_scored, length)
    )
    for window in found:
        assert window.start < window.first_scored < window.stop <= window.start + context
        assert window.first_scored - window.start >= min(context - stride, window.first_scored)


@given(cuts())
def test_windows_fit_the_context_and_every_token_sees_enough_of_it(cut):
    length, context, stride = cut
    for window in windows(length, context, stride):
        assert 0 <= window.start < window.first_scored < window.stop <= length
        assert window.stop - window.start <= context
        assert window.first_scored - window.start >= min(context - stride, window.first_scored)
