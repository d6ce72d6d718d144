"""The router's choice, and that the gradients which it gives to both paths are autograd's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipeline.parallel.topology import SINGLE
from pipeline.scale.router import (
    gradients_of_paths,
    mixed_logits_,
    mixed_streams,
    preserved_tokens,
)

N, D, U, V = 12, 6, 4, 10
PRESERVED = torch.arange(N) % 3 == 0


def some(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_token_is_preserved_where_the_cosine_is_above_the_threshold():
    z_p = some(N, V, seed=0)
    z_a = z_p + some(N, V, seed=1)
    cosines = F.cosine_similarity(z_p, z_a)
    threshold = float(cosines.median())
    expected = cosines > threshold + 1e-4
    assert torch.equal(preserved_tokens(z_p, z_a, threshold + 1e-4, SINGLE), expected)
    assert 0 < expected.sum() < N


def test_logits_of_the_mixed_streams_are_the_mixed_logits():
    weight = some(V, D, seed=2)
    x_p, x_a = some(N, D, seed=3), some(N, D, seed=4)
    x, x_up = mixed_streams((x_p, some(N, U, seed=5)), (x_a, some(N, U, seed=6)), PRESERVED)
    mixed = mixed_logits_(F.linear(x_p, weight), F.linear(x_a, weight), PRESERVED)
    torch.testing.assert_close(F.linear(x, weight), mixed)
    assert torch.equal(x_up[PRESERVED], some(N, U, seed=5)[PRESERVED])
    assert torch.equal(x_up[~PRESERVED], some(N, U, seed=6)[~PRESERVED])


def test_gradients_of_both_paths_are_autograds():
    paths = [some(N, width, seed=seed).requires_grad_() for seed, width in enumerate((D, U, D, U))]
    x_p, x_up_p, x_a, x_up_a = paths
    x, x_up = mixed_streams((x_p, x_up_p), (x_a, x_up_a), PRESERVED)
    of_x, of_x_up = some(N, D, seed=7), some(N, U, seed=8)
    torch.autograd.backward([x, x_up], [of_x, of_x_up])
    found = gradients_of_paths(of_x, of_x_up, PRESERVED)
    assert torch.equal(found.x, x_a.grad)
    assert torch.equal(found.x_up, x_up_a.grad)
    assert torch.equal(found.preserved_x, x_p.grad)
    assert torch.equal(found.preserved_x_up, x_up_p.grad)
    without = gradients_of_paths(None, of_x_up, PRESERVED)
    assert without.x is None and without.preserved_x is None
