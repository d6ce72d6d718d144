"""Every ZeRO stage, over data- and tensor-parallel ranks, trains what one process trains: the expansion alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.model.from_hf import is_base, open_base
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.training.runs import STEPS, losses, make_run, metrics, train_and_look

VARIANTS = {
    "adapt": {},
    "route": {"method__variant": "route"},
    "fft": {"method": {"name": "fft"}, "schedule__learning_rate": 1e-4},
}


@pytest.fixture(scope="module")
def one_process(tokens, tmp_path_factory):
    """The losses and final parameters of each variant on a single rank without sharding."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def run(variant: str) -> tuple[Path, dict[str, Any]]:
        if variant not in made:
            folder = tmp_path_factory.mktemp("one_process")
            config = make_run(folder, tokens, zero=1, schedule__micro_batch_size=8, **VARIANTS[variant])
            made[variant] = folder, run_ranks(train_and_look, 1, config)[0]
        return made[variant]

    return run


@pytest.mark.parametrize(
    ("zero", "world_size", "tp_size", "variant"),
    [
        (1, 2, 1, "adapt"),
        (2, 2, 1, "adapt"),
        (3, 2, 1, "adapt"),
        (3, 2, 1, "route"),
        (3, 2, 1, "fft"),
        (1, 2, 2, "adapt"),
        (3, 4, 2, "adapt"),
    ],
)
def test_a_sharded_run_equals_one_process(tokens, tmp_path, one_process, zero, world_size, tp_size, variant):
    config = make_run(tmp_path, tokens, zero=zero, parallel__tp_size=tp_size, **VARIANTS[variant])
    results = run_ranks(train_and_look, world_size, config)

    reference_folder, reference = one_process(variant)
    assert losses(tmp_path) == pytest.approx(losses(reference_folder), rel=2e-5)
    for key in ("gradient_norm", "perplexity/korean", "bits_per_byte/english"):
        expected = [line[key] for line in metrics(reference_folder) if key in line]
        assert [line[key] for line in metrics(tmp_path) if key in line] == pytest.approx(expected, rel=1e-4)
        assert expected
    for result in results:
        # Full fine-tuning adds nothing whose effect there could be.
        assert result["step0_max_abs_logit_difference"] == (None if variant == "fft" else 0.0)
        assert result["trainable_parameters"] == reference["trainable_parameters"]
        if tp_size == 1:
            assert result["optimizer_state_elements"] == 2 * result["trainable_parameters"]
            _assert_same_parameters(result["parameters"], reference["parameters"])


def _assert_same_parameters(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("zero", [1, 3])
def test_only_the_expansion_changes(tokens, tmp_path, zero):
    # Blocks behind others that start at zero get their first gradient a few steps late.
    config = make_run(tmp_path, tokens, zero=zero)
    parameters = run_ranks(train_and_look, 2, config)[0]["parameters"]

    base = open_base(STORIES)
    start = _initial_parameters(config)
    for name, parameter in parameters.items():
        if is_base(name):
            assert torch.equal(parameter, base.read(name)), name
        else:
            assert not torch.equal(parameter, start[name]), f"{name} did not train"


def _initial_parameters(config: Path) -> dict[str, torch.Tensor]:
    from pipeline import methods
    from pipeline.config import load_config
    from pipeline.parallel.topology import SINGLE

    settings, base = load_config(config), open_base(STORIES)
    model = methods.build_model(settings, base, SINGLE)
    methods.load_initial_weights(model, settings, base, SINGLE)
    return dict(model.named_parameters())


def test_losses_fall(tokens, tmp_path):
    config = make_run(tmp_path, tokens, schedule__learning_rate=5e-3)
    run_ranks(train_and_look, 1, config)
    assert len(losses(tmp_path)) == STEPS
    assert losses(tmp_path)[-1] < 0.8 * losses(tmp_path)[0]
