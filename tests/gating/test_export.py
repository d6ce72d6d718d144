"""Exports with a gate: the trained model's logits, the same with a cache as without, and padded on the left."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors import safe_open

from pipeline.conversion.formats import choose_export
from pipeline.conversion.hf_folder import load_hf_model, write_hf_folder
from pipeline.errors import ConversionError
from tests.bases import reference
from tests.conversion.checkpoints import generate_greedily, save_many, scale, trained, training_decoder
from tests.distributed import run_ranks
from tests.gating.gates import random_gate
from tests.tolerances import assert_near, rounding_of
from tests.widened import some_tokens

MODELS = {
    "preserve": ("llama", "preserve", {"norm": "base"}),
    "adapt": ("llama tied", "adapt", {"collaborative_modules": "both", "norm": "base"}),
    "neox route": ("neox", "route", {"collaborative_modules": "both"}),
    "adapt, undecided": ("llama tied", "adapt", {"collaborative_modules": "both", "norm": "base"}),
}
NEW_TOKENS = 10
generate = partial(generate_greedily, new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def models(base, tmp_path_factory):
    """The trained models, without a gate."""
    folder = tmp_path_factory.mktemp("gated")
    places = {key: folder / key.replace(" ", "-") for key in MODELS}
    jobs = [
        (base(name).path, scale(variant, **changes), places[key]) for key, (name, variant, changes) in MODELS.items()
    ]
    run_ranks(save_many, 1, jobs)
    return {key: trained(base(name).path, places[key]) for key, (name, _, _) in MODELS.items()}


@pytest.fixture(scope="module")
def export(models, tmp_path_factory):
    """Exports a model with a gate; returns the training model with that gate, and the folder."""
    made = {}

    def write(key, opens="sometimes", features="token+running_mean", dtype=torch.float32):
        if (key, opens, features, dtype) not in made:
            decoder = training_decoder(models[key])
            gate = random_gate(
                decoder,
                some_tokens(decoder.spec, 4, 24),
                features=features,
                opens=opens,
                undecided="undecided" in key,
            )
            decoder.gate = gate
            folder = tmp_path_factory.mktemp("hf")
            gated = replace(models[key], gate=gate)
            write_hf_folder(folder, choose_export(gated, "auto", dtype), gated.base.path)
            made[key, opens, features, dtype] = decoder, folder
        return made[key, opens, features, dtype]

    return write


@torch.no_grad()
@pytest.mark.parametrize(
    ("key", "features"), [*((key, "token+running_mean") for key in MODELS), ("adapt", "token"), ("neox route", "token")]
)
def test_logits_are_those_of_the_trained_model(key, features, export):
    decoder, folder = export(key, features=features)
    tokens = some_tokens(decoder.spec, 3, 24, seed=5)
    expected, model = decoder.logits(tokens), load_hf_model(folder)
    assert_near(model(tokens).logits, expected, rounding_of(model.config))
    gate, decoder.gate = decoder.gate, None
    assert (decoder.logits(tokens) - expected).abs().max() > 0.1, "the gate closes nothing"
    assert (decoder.logits(tokens, path="base") - expected).abs().max() > 0.1, "the gate opens nothing"
    decoder.gate = gate


@torch.no_grad()
@pytest.mark.parametrize("key", MODELS)
def test_a_gate_that_never_opens_generates_what_the_base_does(key, export, base):
    _, folder = export(key, opens="never")
    model, original = load_hf_model(folder), reference(base(MODELS[key][0]).path)
    tokens = some_tokens(model.config, 3, 9)
    assert_near(model(tokens).logits, original(tokens).logits, rounding_of(model.config))
    generated = generate(model, tokens)
    assert torch.equal(generated, generate(original, tokens))
    assert not torch.equal(generated, generate(load_hf_model(export(key)[1]), tokens))


@pytest.mark.parametrize(
    ("key", "beams"), [*((key, 1) for key in MODELS), ("neox route", 3), ("adapt", 3), ("adapt, undecided", 3)]
)
def test_generation_with_a_cache_equals_generation_without(key, beams, export):
    """Beam search reorders the cache."""
    model = load_hf_model(export(key)[1])
    tokens = some_tokens(model.config, 3, 9)
    cached = generate(model, tokens, num_beams=beams)
    assert torch.equal(cached, generate(model, tokens, num_beams=beams, use_cache=False))
    assert torch.equal(cached, generate(model, tokens, num_beams=beams, cache_implementation="static"))


@torch.no_grad()
@pytest.mark.parametrize("key", MODELS)
def test_logits_token_by_token_equal_logits_at_once(key, export):
    """Also after the cache was cropped, as in assisted generation, and beyond the running mean's window."""
    model = load_hf_model(export(key)[1])
    tokens = some_tokens(model.config, 2, 14)
    expected = model(tokens, use_cache=False).logits
    cache, steps = None, []
    for part in tokens.split([5, 1, 1, 4, 3], dim=1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert_near(torch.cat(steps, dim=1), expected, rounding_of(model.config))
    cache.crop(-6)
    assert_near(model(tokens[:, 8:], past_key_values=cache).logits, expected[:, 8:], rounding_of(model.config))
    assert_near(model(tokens, logits_to_keep=2).logits, expected[:, -2:], rounding_of(model.config))
    long = some_tokens(model.config, 1, 150)
    first = model(long[:, :140], use_cache=True)
    rest = model(long[:, 140:], past_key_values=first.past_key_values).logits
    assert_near(rest, model(long, use_cache=False).logits[:, 140:], rounding_of(model.config))


@torch.no_grad()
@pytest.mark.parametrize("key", MODELS)
def test_documents_packed_in_one_row_do_not_see_each_other(key, export):
    """transformers knows them by positions that begin again."""
    model = load_hf_model(export(key)[1])
    documents = [some_tokens(model.config, 1, length, seed=length) for length in (9, 14)]
    positions = torch.cat([torch.arange(9), torch.arange(14)]).unsqueeze(0)
    packed = model(torch.cat(documents, dim=1), position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    assert_near(packed, alone, rounding_of(model.config))


@torch.no_grad()
@pytest.mark.parametrize("key", MODELS)
def test_prompts_of_several_lengths_in_one_batch(key, export):
    model = load_hf_model(export(key)[1])
    prompts = [some_tokens(model.config, length, seed=length) for length in (3, 8, 5)]
    padded = torch.stack([torch.nn.functional.pad(prompt, (8 - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(8) >= 8 - len(prompt)).long() for prompt in prompts])
    together = generate(model, padded, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row, 8:], generate(model, prompt.unsqueeze(0))[0, len(prompt) :])
        direct = model(padded, attention_mask=mask).logits[row, 8 - len(prompt) :]
        assert_near(direct, model(prompt.unsqueeze(0)).logits[0], rounding_of(model.config))


@torch.no_grad()
@pytest.mark.parametrize("key", MODELS)
def test_layers_may_be_on_several_devices(key, export):
    model = load_hf_model(export(key)[1])
    elsewhere = torch.device("meta")
    for module in (*model.layers[1:], model.final_norm, model.token_gate, model.output):
        add_hook_to_module(module.to(elsewhere), AlignDevicesHook(execution_device=elsewhere))
    tokens = some_tokens(model.config, 2, 9)
    out = model(tokens, attention_mask=torch.ones_like(tokens))
    assert out.logits.device == elsewhere and out.logits.shape == (2, 9, model.config.vocab_size)
    model(tokens[:, :1], past_key_values=out.past_key_values)


def test_in_sixteen_bits_the_gate_stays_in_fp32(export):
    decoder, folder = export("adapt", dtype=torch.bfloat16)
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        stored = {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith("token_gate.")}  # noqa: SIM118
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    model = load_hf_model(folder)
    assert model.dtype == torch.bfloat16
    for name, tensor in decoder.gate.tensors.items():
        assert torch.equal(model.token_gate.get_parameter(name), tensor)
        assert torch.equal(stored[f"token_gate.{name}"], tensor)


def test_stock_is_refused_and_auto_is_scale(models, export):
    decoder, _ = export("preserve")
    assert choose_export(models["preserve"], "auto", torch.float32).format == "stock"
    gated = replace(models["preserve"], gate=decoder.gate)
    assert choose_export(gated, "auto", torch.float32).format == "scale"
    with pytest.raises(ConversionError, match="--without-gate"):
        choose_export(gated, "stock", torch.float32)
