"""Hosted bases whose linear maps are stored in 8 or 4 bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from pipeline.config.run import load_config
from pipeline.errors import BaseModelError
from pipeline.extensions.hosted.quantized_maps import quantized_share
from pipeline.methods.build_model import build_model
from pipeline.model.bases import load_base
from pipeline.parallel.parameters import quantization_of
from pipeline.parallel.quantized import rounded
from pipeline.parallel.topology import SINGLE
from tests.distributed import run_ranks
from tests.extensions.hosted.bases import by_transformers, opened, save_hosted
from tests.extensions.hosted.test_gate import ADAPT
from tests.training.runs import in_turn, losses, make_run, train_and_look, write_config
from tests.widened import some_tokens

pytestmark = pytest.mark.full

# Plain linear maps; GPT-2's [in, out]; experts and latent attention; linear attention.
KINDS = ["granite", "gpt2", "deepseek_v3", "qwen3_next"]
OWN = {"open_rows": {"min_count": 3}, "open_gains": True, "low_rank": 2}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_hosted(kind, folder / kind) for kind in KINDS}


def _model(base, folder, precision="nf4", **changes):
    config = load_config(
        write_config(
            folder,
            folder,
            zero=1,
            base=str(base.path),
            base_code="transformers",
            base_precision=precision,
            method={**ADAPT, **changes},
        )
    )
    model = build_model(config, base.spec, SINGLE)
    load_base(model, base)
    return model


@pytest.mark.parametrize("precision", ["nf4", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_base_is_transformers_with_rounded_matrices(kind, precision, bases, tmp_path):
    base = opened(bases[kind])
    model = _model(base, tmp_path, precision)
    expected = by_transformers(base)
    matrices = 0
    for name, parameter in model.base.named_parameters():
        if quantization_of(parameter) is None:
            continue
        module = expected.get_submodule(name.removesuffix(".weight"))
        matrix = module.weight.T if isinstance(module, Conv1D) else module.weight
        matrices += matrix.numel()
        matrix.copy_(rounded(matrix, precision))
    every = sum(parameter.numel() for parameter in expected.parameters())
    assert quantized_share(base.spec) == pytest.approx(matrices / every)
    assert matrices > 0.05 * every
    tokens = some_tokens(base.spec, 2, 20)
    found = model.logits(tokens, path="base")
    torch.testing.assert_close(found, expected(tokens, use_cache=False).logits.float())


def test_a_map_whose_weight_gives_its_input_a_type_is_refused_by_name(bases, tmp_path):
    model = _model(opened(bases["granite"]), tmp_path)
    name = "model.layers.0.self_attn.q_proj"
    with pytest.raises(BaseModelError, match=rf"base_precision: .* {name}'s weight"):
        model.base.get_submodule(name)(torch.zeros(1, 32, dtype=torch.uint8))


def test_it_trains_on_one_rank_as_on_two_and_leaves_with_the_base_as_published(
    bases, tokens, tmp_path
):
    paths = {}
    for ranks in (1, 2):
        for kind in ("granite", "qwen3_next"):
            paths[kind, ranks] = make_run(
                tmp_path / f"{kind}-{ranks}",
                tokens,
                zero=ranks,
                base=str(bases[kind]),
                base_precision="nf4",
                method={**ADAPT, **OWN},
                gate={"tokens": 100},
                schedule__steps=3,
                schedule__learning_rate=0.02,
                activation_checkpointing="all" if ranks == 2 else "none",
            )
    for ranks in (1, 2):
        jobs = [partial(train_and_look, path) for key, path in paths.items() if key[1] == ranks]
        for found in run_ranks(in_turn, ranks, jobs)[0]:
            assert not isinstance(found, str), found
            assert found["step0_max_abs_logit_difference"] == 0.0
    for kind in ("granite", "qwen3_next"):
        one = losses(tmp_path / f"{kind}-1")
        torch.testing.assert_close(losses(tmp_path / f"{kind}-2"), one, rtol=0, atol=1e-4)
