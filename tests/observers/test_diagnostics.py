"""The diagnostics that every run writes: what they say of a model that learned, and that all stages agree on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.run_folder.metrics import read_metrics
from tests.distributed import run_ranks
from tests.training.runs import make_run, train

LAYERS, L_FP = 5, 3


def last_figures(folder: Path) -> dict[str, float]:
    return read_metrics(folder / "metrics.jsonl")[-1]


def diagnostics(figures: dict[str, float]) -> dict[str, float]:
    names = ("kl_from_base/", "base_stream_cosine/", "norm_")
    return {name: value for name, value in figures.items() if name.startswith(names)}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> dict[int, dict[str, float]]:
    """The last figures of one short run under each ZeRO stage, on two ranks."""
    found = {}
    for zero in (1, 2, 3):
        config = make_run(tmp_path_factory.mktemp(f"zero{zero}"), tokens, zero=zero)
        run_ranks(train, 2, config)
        found[zero] = diagnostics(last_figures(config.parent))
    return found


def test_the_base_stream_leaves_its_place_in_collaborative_layers_only(adapted):
    cosines = [adapted[3][f"base_stream_cosine/layer_{layer:02d}"] for layer in range(LAYERS)]
    assert all(cosine == pytest.approx(1, abs=1e-6) for cosine in cosines[:L_FP])
    assert all(cosine < 1 - 1e-6 for cosine in cosines[L_FP:])


def test_w12_grows_in_collaborative_layers_only(adapted):
    layers = [name for name in adapted[3] if name.startswith("norm_expansion_to_base/")]
    assert layers == [f"norm_expansion_to_base/layer_{layer:02d}" for layer in range(L_FP, LAYERS)]
    assert all(adapted[3][name] > 0 for name in layers)


def test_the_model_has_left_its_base(adapted):
    assert adapted[3]["kl_from_base/english"] > 0


@pytest.mark.parametrize("zero", [1, 2])
def test_every_zero_stage_tells_the_same(adapted, zero):
    # Sums run in another order: fp32 rounding through a few steps.
    assert adapted[zero] == pytest.approx(adapted[3], rel=1e-3)


def test_preserve_never_moves_the_base_stream(tmp_path, tokens):
    config = make_run(tmp_path, tokens, method__variant="preserve", method__l_fp=None)
    run_ranks(train, 2, config)
    figures = last_figures(tmp_path)
    assert all(
        figures[f"base_stream_cosine/layer_{layer:02d}"] == pytest.approx(1, abs=1e-6) for layer in range(LAYERS)
    )
    assert not any(name.startswith("norm_expansion_to_base/") for name in figures)
    assert figures["kl_from_base/english"] > 0
