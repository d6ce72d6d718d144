"""Runs on hosted bases with open weights, through training, export and generation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.trained_model import open_trained
from pipeline.config.run import load_config
from pipeline.conversion.adapter import load_with_adapter
from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.errors import ConversionError
from pipeline.files.json_files import read_object
from tests.distributed import run_ranks
from tests.extensions.hosted.bases import by_transformers, opened, save_hosted
from tests.extensions.hosted.test_export import NEAR, gated, loaded, opened_spec
from tests.extensions.hosted.test_gate import ADAPT
from tests.training.runs import in_turn, losses, make_run, train, train_and_look
from tests.widened import some_tokens

pytestmark = pytest.mark.full
OWN = {"open_rows": {"min_count": 3}, "open_gains": True}
METHOD = {**ADAPT, **OWN, "low_rank": 2}
LORA = {"name": "lora", "rank": 2, "open_first_layer": 1, **OWN}
RUNS = {
    "gemma2": METHOD,
    "deepseek_v3": METHOD,
    "phi": METHOD,
    "gpt2": METHOD,
    "qwen3_next": METHOD,
    "granite": METHOD,
    "gpt2 lora": LORA,
    "qwen3_next lora": LORA,
}
KINDS = list(RUNS)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    kinds = sorted({run.split()[0] for run in RUNS})
    return {kind: save_hosted(kind, folder / kind) for kind in kinds}


@pytest.fixture(scope="module")
def configs(bases, tokens, tmp_path_factory):
    """A run of each kind, by how many ranks train it, not trained yet."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for ranks, zero in ((1, 1), (2, 3)):
        for kind in KINDS:
            made[kind, ranks] = make_run(
                folder / f"{kind.replace(' ', '_')}-{ranks}",
                tokens,
                zero=zero,
                base=str(bases[kind.split()[0]]),
                base_code="transformers",
                method=RUNS[kind],
                gate={"tokens": 100},
                schedule__steps=4,
                schedule__learning_rate=0.02,
                activation_checkpointing="all" if ranks == 2 else "none",
            )
    return made


@pytest.fixture(scope="module")
def runs(configs):
    """The configuration of each kind's trained run."""
    jobs = [partial(train, configs[kind, 1]) for kind in KINDS]
    assert run_ranks(in_turn, 1, jobs) == [[0] * len(KINDS)]
    return {kind: load_config(configs[kind, 1]) for kind in KINDS}


@pytest.fixture(scope="module")
def exports(runs, tmp_path_factory):
    """Exported folders by kind and how the gate opens."""
    folder = tmp_path_factory.mktemp("exports")
    made = {}

    def export(kind, opens):
        if (kind, opens) not in made:
            config = runs[kind]
            gate = gated(config, folder / f"{kind}-{opens}-gate", opens)
            output = folder / f"{kind}-{opens}"
            request = Conversion(newest_checkpoint(config), config.base, output, gate=gate)
            assert convert(request, probe_maker({}))
            made[kind, opens] = output
        return made[kind, opens]

    return export


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_trained(kind, runs, exports):
    config = runs[kind]
    trained = open_trained(newest_checkpoint(config), config.base)
    model = loaded(exports(kind, "always"))
    weights = dict(model.named_parameters())
    for name in ("own_input.rows.weight", "output.own_rows"):
        assert weights[name].abs().max() > 0.01
    assert any(".adapter." in name and weights[name].abs().max() > 0.01 for name in weights)
    assert any(".own." in name and weights[name].abs().max() > 0.01 for name in weights)
    tokens = some_tokens(trained.spec, 2, 24)
    decoder = trained.loaded(torch.float32, torch.device("cpu"))
    found = model(tokens, use_cache=False).logits
    torch.testing.assert_close(found, decoder.logits(tokens), **NEAR)
    assert (found - decoder.logits(tokens, path="base")).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_closed_text_is_transformers_own_to_the_bit(kind, bases, exports):
    """After training, through the export, in one pass and in generation with a cache."""
    model = loaded(exports(kind, "never"))
    base = by_transformers(opened(bases[kind.split()[0]]))
    # The same memory: a product with a vector rounds by where its operands lie.
    base.load_state_dict(model.base.state_dict(), assign=True)
    tokens = some_tokens(opened_spec(model), 2, 24)
    scores = {"output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad():
        expected = base(tokens, use_cache=False).logits
        assert torch.equal(model(tokens, use_cache=False).logits, expected)
        found = model.generate(tokens, **GREEDY, **scores)
        theirs = base.generate(tokens, **GREEDY, **scores)
    assert torch.equal(found.sequences, theirs.sequences)
    for own, of_base in zip(found.scores, theirs.scores, strict=True):
        assert torch.equal(own, of_base)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_is_that_without_a_cache(kind, beams, exports):
    model = loaded(exports(kind, "sometimes"))
    prompt = some_tokens(opened_spec(model), 2, 9)
    with_cache = model.generate(prompt, use_cache=True, num_beams=beams, **GREEDY)
    without = model.generate(prompt, use_cache=False, num_beams=beams, **GREEDY)
    assert torch.equal(with_cache, without)


def test_an_export_without_a_gate_is_refused_by_name(runs, tmp_path):
    config = runs["granite"]
    request = Conversion(newest_checkpoint(config), config.base, tmp_path / "x", format="scale")
    with pytest.raises(ConversionError, match=r"scale: method\.open_rows, open_gains"):
        convert(request, probe_maker({}))


def test_two_ranks_under_zero_3_train_what_one_trains(configs, runs, tokens):
    jobs = [partial(train_and_look, configs[kind, 2]) for kind in KINDS]
    two = run_ranks(in_turn, 2, jobs)
    for place, kind in enumerate(KINDS):
        found = two[0][place]
        assert not isinstance(found, str), found
        assert found["step0_max_abs_logit_difference"] == 0.0
        one = losses(runs[kind].folder)
        torch.testing.assert_close(losses(configs[kind, 2].parent), one, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3"])
def test_lora_alone_leaves_as_an_adapter_of_the_base_s_own_modules(kind, bases, tokens, tmp_path):
    path = make_run(
        tmp_path / "run",
        tokens,
        zero=1,
        base=str(bases[kind]),
        base_code="transformers",
        method={"name": "lora", "rank": 2, "alpha": 3},
        schedule__steps=4,
        schedule__learning_rate=0.02,
    )
    assert run_ranks(train, 1, path) == [0]
    config = load_config(path)
    output = tmp_path / "adapter"
    request = Conversion(newest_checkpoint(config), config.base, output, format="peft")
    assert convert(request, probe_maker({}))
    trained = open_trained(newest_checkpoint(config), config.base)
    windows = some_tokens(trained.spec, 2, 24)
    model = load_with_adapter(config.base, output, torch.float32).eval()
    decoder = trained.loaded(torch.float32, torch.device("cpu"))
    with torch.no_grad():
        found = model(windows, use_cache=False).logits
    torch.testing.assert_close(found, decoder.logits(windows), **NEAR)
    assert (found - decoder.logits(windows, path="base")).abs().max() > 1e-3
    targets = read_object(output / "adapter_config.json", ConversionError)["target_modules"]
    modules = dict(model.named_modules())
    layers = trained.spec.structure.layers
    assert len(targets) == sum(len(layer.linear_maps) for layer in layers)
    assert all(isinstance(modules[target], (nn.Linear, Conv1D)) for target in targets)
