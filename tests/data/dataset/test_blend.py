"""The order of samples is arithmetic: complete, in proportion, equal on any ranks."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.dataset.blend import (
    BLOCK,
    Blend,
    PassingBlend,
    Permutation,
    Share,
    floor_sum,
    tempered,
)
from pipeline.data.dataset.samples import SampleOrder, rank_indices
from pipeline.errors import DataError

NO_LIMIT = Share(1.0, None)


@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 50))
def test_a_permutation_hits_everything_once(size: int, seed: int, epoch: int):
    permutation = Permutation(size, seed, epoch)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))


@given(st.integers(2**20, 2**48), st.integers(0, 2**64), st.data())
def test_a_large_permutation_stays_in_range_and_keeps_indices_apart(
    size: int, seed: int, data: st.DataObject
):
    permutation = Permutation(size, seed)
    indices = data.draw(st.sets(st.integers(0, size - 1), max_size=50))
    images = {permutation[index] for index in indices}
    assert len(images) == len(indices)
    assert all(0 <= image < size for image in images)


def test_a_permutation_looks_random():
    """Over many keys every value lands everywhere about equally often, and neighbours do not stay
    neighbours."""
    size, keys = 10, 4000
    counts = np.zeros((size, size))
    neighbours = 0
    for key in range(keys):
        permutation = Permutation(size, key)
        order = [permutation[index] for index in range(size)]
        counts[np.arange(size), order] += 1
        neighbours += sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    expected = keys / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 150  # 81 degrees of freedom: 81 ± 13
    assert abs(neighbours / keys - 2 * (size - 1) / size) < 0.1


@given(st.integers(0, 60), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_floor_sum_is_the_sum(count: int, modulus: int, factor: int, offset: int):
    expected = sum((factor * k + offset) // modulus for k in range(count))
    assert floor_sum(count, modulus, factor, offset) == expected


@st.composite
def shares(draw: st.DrawFn) -> dict[str, Share]:
    count = draw(st.integers(1, 5))
    weights = draw(st.lists(st.floats(0.01, 100), min_size=count, max_size=count))
    budgets = draw(st.lists(st.integers(1, 700), min_size=count, max_size=count))
    return {
        f"c{number}": Share(*pair) for number, pair in enumerate(zip(weights, budgets, strict=True))
    }


@settings(max_examples=40, deadline=None)
@given(shares(), st.integers(0, 5000))
def test_every_draw_of_every_corpus_happens_once(shares: dict[str, Share], index: int):
    blend = Blend(shares)
    assert blend.total == sum(share.budget or 0 for share in shares.values())
    draws = [blend[index] for index in range(blend.total)]
    for name, share in shares.items():
        occurrences = [draw.occurrence for draw in draws if draw.corpus == name]
        # In order: a pass ends before the next begins.
        assert occurrences == list(range(share.budget or 0))
    with pytest.raises(DataError, match="raise epochs or token_budget"):
        blend[blend.total]
    index = min(index, blend.total)
    counts = Counter(draw.corpus for draw in draws[:index])
    assert blend.drawn_before(index) == {name: counts[name] for name in blend.names}


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 10), min_size=3, max_size=6),
    budgets=st.lists(st.none() | st.integers(1, 400), min_size=6, max_size=6),
    fraction=st.sampled_from([0.0, 1 / 16, 0.3]),
    index=st.integers(0, 2000),
)
def test_draws_of_any_roles_are_counted_as_they_come(
    weights: list[float], budgets: list[int | None], fraction: float, index: int
):
    """A corpus of each role but the first; some end before the others, and the others continue."""
    roles = ["new", "replay", "self_generated"]
    shares = {
        f"c{number}": Share(weight, budgets[number], roles[number % 3])
        for number, weight in enumerate(weights)
    }
    blend = Blend(shares, {"replay": fraction, "self_generated": fraction})
    if blend.total is not None:
        index = min(index, blend.total)
    draws = [blend[at] for at in range(index)]
    for name, share in shares.items():
        occurrences = [draw.occurrence for draw in draws if draw.corpus == name]
        assert occurrences == list(range(len(occurrences)))
        assert share.budget is None or len(occurrences) <= share.budget
        assert blend.drawn_before(index)[name] == len(occurrences)
        if share.role != "new" and fraction == 0:
            assert not occurrences


@given(
    st.lists(st.floats(0.02, 1.0), min_size=2, max_size=5),
    st.integers(0, 10**9),
    st.integers(50, 2000),
)
def test_any_range_has_the_proportions(weights: list[float], start: int, length: int):
    blend = Blend({str(number): Share(weight, None) for number, weight in enumerate(weights)})
    drawn = Counter(blend[index].corpus for index in range(start, start + length))
    for number, weight in enumerate(weights):
        assert abs(drawn[str(number)] - length * weight / sum(weights)) < 8


@given(
    st.lists(st.integers(1, 10**13), min_size=2, max_size=6, unique=True),
    st.floats(1, 100),
    st.floats(1.1, 100),
)
def test_a_temperature_makes_shares_of_sizes(
    sizes: list[int], temperature: float, hotter_by: float
):
    """Proportional at 1, the power 1 / T in between, and with a higher T more even but never in
    another order."""
    named = {str(size): size for size in sizes}
    factors = tempered(named, temperature)
    for name, size in named.items():
        assert tempered(named, 1)[name] == size / max(sizes)
        assert factors[name] ** temperature == pytest.approx(size / max(sizes))
        assert 0 < factors[name] <= tempered(named, temperature * hotter_by)[name] <= 1
    assert sorted(named, key=named.__getitem__) == sorted(named, key=factors.__getitem__)


def test_roles_and_weights_divide_the_draws():
    """Of a role that has no fraction nothing is drawn; a tiny weight still is."""
    shares = {
        "a": Share(3, None), "b": Share(1, None), "tiny": Share(1e-9, None), "c": Share(2, None, "replay"),
        "d": Share(2, None, "replay"), "own": Share(7.0, None, "self_generated"),
    }  # fmt: skip
    drawn = Blend(shares, {"replay": 1 / 16, "self_generated": 1 / 16}).drawn_before(BLOCK)
    expected = {"a": 21 / 32, "b": 7 / 32, "tiny": 0, "c": 1 / 32, "d": 1 / 32, "own": 1 / 16}
    # Draws are whole: each count is off by at most two.
    assert {name: count / BLOCK for name, count in drawn.items()} == pytest.approx(
        expected, abs=2 / BLOCK
    )
    assert drawn["tiny"] > 0
    assert Blend(shares).drawn_before(BLOCK)["c"] == 0

    # A sixteenth is spread evenly: about one in every 16 draws.
    corpora = {"korean": NO_LIMIT, "english": Share(1.0, None, role="replay")}
    blend = Blend(corpora, fractions={"replay": 1 / 16})
    total = 0
    for start in range(0, 16 * 512, 16):
        replayed = sum(blend[index].corpus == "english" for index in range(start, start + 16))
        assert replayed in (0, 1, 2)
        total += replayed
    assert abs(total - 512) <= 1


def test_the_others_continue_after_a_corpus_is_exhausted():
    blend = Blend(
        {"short": Share(1, 30), "long": Share(1, 300), "old": Share(1, None, "replay")},
        fractions={"replay": 0.25},
    )
    names = [blend[index].corpus for index in range(blend.total or 0)]
    assert Counter(names)["short"] == 30
    assert Counter(names)["long"] == 300
    assert abs(Counter(names)["old"] - 110) <= 3
    assert Counter(names[:80])["short"] == pytest.approx(30, abs=2)
    assert abs(Counter(names[-200:])["old"] - 50) <= 3


def order(seed: int = 1) -> SampleOrder:
    blend = Blend(
        {"ko": Share(3.0, None), "law": Share(1.0, 40), "en": Share(1.0, None, "replay")},
        fractions={"replay": 0.1},
    )
    return SampleOrder(blend, {"ko": 37, "law": 20, "en": 11}, seed)


def test_each_pass_over_a_corpus_reads_each_of_its_samples_once():
    ours, passes = order(), {}
    for index in range(2000):
        name, number = ours[index]
        passes.setdefault(name, []).append(number)
    assert len(passes["law"]) == 40  # two epochs, then never again
    for name, length in (("ko", 37), ("law", 20), ("en", 11)):
        whole = len(passes[name]) // length * length
        epochs = [passes[name][at : at + length] for at in range(0, whole, length)]
        assert len(epochs) > 1
        assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
        assert epochs[0] != epochs[1]


@given(
    global_batch=st.integers(1, 48),
    dp_size=st.integers(1, 9),
    micro=st.integers(1, 8),
    resumed=st.lists(st.integers(0, 6), max_size=3),
    other_dp_size=st.integers(1, 9),
)
def test_any_ranks_and_resume_points_read_the_same_batches(
    global_batch: int, dp_size: int, micro: int, resumed: list[int], other_dp_size: int
):
    """Six steps, resumed at some of them on another number of ranks: each reads its own batch,
    every sample once."""
    for step in range(7):
        ranks = other_dp_size if step in resumed else dp_size
        first_sample = step * global_batch
        read: list[int] = []
        for rank in range(ranks):
            micro_batches = rank_indices(
                first_sample,
                global_batch_size=global_batch,
                micro_batch_size=micro,
                dp_rank=rank,
                dp_size=ranks,
            )
            for micro_batch in micro_batches:
                assert len(micro_batch) <= micro
                read += micro_batch
            if global_batch % (ranks * micro) == 0:
                assert len(micro_batches) == global_batch // (ranks * micro)
        assert sorted(read) == list(range(first_sample, first_sample + global_batch))


@given(st.integers(1, 400), st.integers(0, 5), st.integers(1, 5))
def test_a_passage_draws_from_two_blends_along_a_line(length: int, before: int, after: int):
    def blend(korean: int, english: int) -> Blend:
        shares = {"korean": Share(korean + 1.0, None), "english": Share(english + 1.0, None)}
        return Blend(shares)

    passing = PassingBlend(blend(before, 1), blend(1, after), length)
    counts: Counter[str] = Counter()
    of_after = 0
    for index in range(2 * length):
        assert passing.drawn_before(index) == {name: counts[name] for name in ("korean", "english")}
        expected = min(index, length) ** 2 / (2 * length) + max(0, index - length)
        assert abs(of_after - expected) <= 1, "the integral of the line"
        of_after = passing._drawn_from_after(index + 1)
        drawn = passing[index]
        assert drawn.occurrence == counts[drawn.corpus], "each sample of a corpus once, in order"
        counts[drawn.corpus] += 1
    with pytest.raises(IndexError):
        _ = passing[-1]


def test_a_passage_ends_with_its_corpora():
    def blend(budget: int) -> Blend:
        return Blend({"korean": Share(1.0, budget)})

    passing = PassingBlend(blend(30), blend(30), 20)
    assert passing.total == 30 + 10
    assert passing[39].occurrence == 39
    with pytest.raises(DataError):
        _ = passing[40]
    assert PassingBlend(blend(4), blend(30), 20).total == 4
