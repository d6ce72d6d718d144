"""Channels that a folder stores scaled are read unscaled, whole or in rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.model.spec import StoredResidual

SIZE = 12
NAMES = {
    "embedding.base.weight": "columns",
    "layers.0.attention.output.base.weight": "rows",
    "layers.0.ffn.down.base.bias": "rows",
    "layers.0.ffn_norm.base.weight": "gains",
    "final_norm.base.weight": "gains",
    "layers.0.attention.query.base.weight": "nothing",
    "layers.0.attention.query_norm.base.weight": "nothing",
    "layers.0.ffn_post_norm.base.weight": "nothing",
    "output.base": "nothing",
}


def values(name: str) -> torch.Tensor:
    shape = (SIZE,) if name.endswith(("bias", "norm.base.weight")) else (SIZE, SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_only_what_touches_the_added_channels_is_scaled(name):
    natural, stored = values(name), StoredResidual(8, 2.0**-20).store(name, values(name))
    factor = {"columns": 2.0**-20, "rows": 2.0**-20, "gains": 2.0**20, "nothing": 1.0}[NAMES[name]]
    changed = (..., slice(8, None)) if NAMES[name] == "columns" else slice(8, None)
    expected = natural.clone()
    expected[changed] *= factor
    assert torch.equal(stored, expected)


def test_maps_that_read_the_stream_without_a_norm_undo_the_scale():
    name = "layers.0.attention.query.base.weight"
    residual = StoredResidual(8, 2.0**-20, read_unnormed=True)
    stored = residual.store(name, values(name))
    assert torch.equal(stored[:, 8:], values(name)[:, 8:] * 2.0**20) and torch.equal(
        stored[:, :8], values(name)[:, :8]
    )
    assert torch.equal(residual.restore(name, stored), values(name))


@given(
    st.sampled_from(sorted(NAMES)), st.integers(0, SIZE), st.integers(0, SIZE), st.integers(1, SIZE)
)
def test_any_rows_are_restored(name, first, stop, normed_size):
    first, stop = sorted((first, stop))
    residual = StoredResidual(normed_size, 2.0**-20)
    stored = residual.store(name, values(name))
    assert torch.equal(
        residual.restore(name, stored[first:stop].clone(), first), values(name)[first:stop]
    )
