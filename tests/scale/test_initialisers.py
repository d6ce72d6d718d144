"""How W21, W22 and the embedding's new columns start, against torch's own decomposition."""

from __future__ import annotations

import pytest
import torch

from pipeline.scale.initialisers import (
    base_to_expansion,
    expansion_to_expansion,
    he_random,
    leading_columns,
    leading_rows,
)

SHAPES = [(24, 24), (24, 40), (40, 24)]


def weight_of(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def up_to_sign(rows, others):
    """`rows` with the sign of each row chosen to match the same row of `others`."""
    signs = (rows * others).sum(1, keepdim=True).sign()
    return rows, signs * others


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_svd_rows_are_sigma_times_v_transposed(shape):
    weight = weight_of(shape)
    _, sigma, v_t = torch.linalg.svd(weight.double(), full_matrices=False)
    expected = (sigma.unsqueeze(1) * v_t)[:9].float()
    found = base_to_expansion("svd", weight, 9, seed=0, name="block")
    torch.testing.assert_close(*up_to_sign(found, expected), rtol=0, atol=1e-5)
    assert found.shape == (9, shape[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_beyond_the_rank_are_random(shape):
    weight = weight_of(shape)
    found = base_to_expansion("svd", weight, 50, seed=3, name="block")
    rank = min(shape)
    assert torch.equal(found[:rank], leading_rows(weight, 50))
    assert torch.equal(found[rank:], he_random(50, shape[1], seed=3, name="block")[rank:])


def test_each_rows_largest_entry_is_positive():
    """An SVD's signs are arbitrary: fixing them makes every machine write the same expansion."""
    rows = leading_rows(weight_of((24, 40)), 24)
    assert (rows.gather(1, rows.abs().argmax(1, keepdim=True)) > 0).all()
    assert torch.allclose(leading_rows(-weight_of((24, 40)), 24), rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_svd_of_w22_holds_the_leading_singular_values(shape):
    weight = weight_of(shape)
    sigma = torch.linalg.svdvals(weight)
    found = expansion_to_expansion("svd", weight, 9, 6, seed=0, name="block")
    assert found.shape == (9, 6)
    torch.testing.assert_close(found.diagonal(), sigma[:6], rtol=0, atol=1e-5)
    assert not (
        found - torch.diag(found.diagonal()).new_zeros(9, 6).diagonal_scatter(found.diagonal())
    ).any()


@pytest.mark.parametrize(
    "initialise", [base_to_expansion, lambda *a, **k: expansion_to_expansion(*a, 40, **k)]
)
def test_random_blocks_have_he_s_deviation_and_zero_blocks_nothing(initialise):
    weight = weight_of((300, 40))
    found = initialise("random", weight, 500, seed=0, name="block")
    assert found.std() == pytest.approx((2 / 40) ** 0.5, rel=0.02)
    assert abs(found.mean()) < 0.01
    assert not initialise("zero", weight, 500, seed=0, name="block").any()


def test_the_embeddings_new_columns_are_its_leading_projections():
    weight = weight_of((97, 24))
    u, sigma, _ = torch.linalg.svd(weight.double(), full_matrices=False)
    found = leading_columns(weight, 9, seed=0, name="embedding")
    directions = torch.linalg.lstsq(weight, found).solution
    assert (directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)) > 0).all(), (
        "other signs, other runs"
    )
    expected = (u * sigma)[:, :9].float()
    torch.testing.assert_close(*up_to_sign(found.T, expected.T), rtol=0, atol=1e-5)
    wider = leading_columns(weight, 30, seed=0, name="embedding")
    assert torch.allclose(wider[:, :9], found)
    assert torch.equal(wider[:, 24:], he_random(97, 6, seed=0, name="embedding"))


def test_a_weight_of_low_rank_gives_no_garbage():
    weight = weight_of((24, 3)) @ weight_of((3, 40), seed=1)
    found = leading_rows(weight, 9)
    assert found.isfinite().all()
    assert found[:3].norm(dim=1).min() > 1
    assert found[3:].abs().max() < 1e-3
