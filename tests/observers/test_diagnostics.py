"""The diagnostics that every run writes: their values for a trained model, which agree under all ZeRO stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.run_folder.metrics import read_metrics
from tests.distributed import run_ranks
from tests.training.runs import make_run, train_each

LAYERS, L_FP = 5, 3
SHORT = {"schedule__steps": 3}


def last_figures(folder: Path) -> dict[str, float]:
    return read_metrics(folder / "metrics.jsonl")[-1]


def diagnostics(figures: dict[str, float]) -> dict[str, float]:
    names = ("kl_from_base/", "base_stream_cosine/", "norm_")
    return {name: value for name, value in figures.items() if name.startswith(names)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> dict[int | str, dict[str, float]]:
    """The last figures of a short Adapt run under each ZeRO stage, and of a Preserve run, on two ranks."""
    runs = {zero: make_run(tmp_path_factory.mktemp(f"zero{zero}"), tokens, zero=zero, **SHORT) for zero in (1, 2, 3)}
    preserve = {"method__variant": "preserve", "method__l_fp": None}
    runs["preserve"] = make_run(tmp_path_factory.mktemp("preserve"), tokens, **preserve, **SHORT)
    assert run_ranks(train_each, 2, list(runs.values())) == [[0] * 4] * 2
    return {name: diagnostics(last_figures(config.parent)) for name, config in runs.items()}


def test_the_base_stream_changes_in_collaborative_layers_only(found):
    cosines = [found[3][f"base_stream_cosine/layer_{layer:02d}"] for layer in range(LAYERS)]
    assert all(cosine == pytest.approx(1, abs=1e-6) for cosine in cosines[:L_FP])
    assert all(cosine < 1 - 1e-6 for cosine in cosines[L_FP:])


def test_w12_grows_in_collaborative_layers_only(found):
    layers = [name for name in found[3] if name.startswith("norm_expansion_to_base/")]
    assert layers == [f"norm_expansion_to_base/layer_{layer:02d}" for layer in range(L_FP, LAYERS)]
    assert all(found[3][name] > 0 for name in layers)


def test_the_model_differs_from_its_base(found):
    assert found[3]["kl_from_base/english"] > 0


@pytest.mark.parametrize("zero", [1, 2])
def test_every_zero_stage_gives_the_same_figures(found, zero):
    # Sums have another order: fp32 rounding through a few steps.
    assert found[zero] == pytest.approx(found[3], rel=1e-3)


def test_preserve_never_changes_the_base_stream(found):
    figures = found["preserve"]
    assert all(
        figures[f"base_stream_cosine/layer_{layer:02d}"] == pytest.approx(1, abs=1e-6) for layer in range(LAYERS)
    )
    assert not any(name.startswith("norm_expansion_to_base/") for name in figures)
    assert figures["kl_from_base/english"] > 0
