"""Each method in each format that can express it, on a base of each kind; and every family in every
format."""

from __future__ import annotations

import json

import pytest
import torch

from pipeline.conversion.model_card import on_stored_scale
from pipeline.errors import ConversionError
from pipeline.hf import write as hf_write
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.write import write_hf_folder
from pipeline.model.from_hf import open_base
from tests.bases import CONFIGS
from tests.conversion.exports import (
    METHODS,
    MORE_METHODS,
    assert_exported,
    choose_export,
    exported,
    loaded_with_base,
    pairs,
)
from tests.tolerances import PARITY, assert_near, rounding
from tests.widened import some_tokens, unwidened

# Tied; layers without rotary embedding; fused maps; norms after attention; both, with an embedding
# that is scaled; LayerNorm and biases.
KINDS = ["llama tied", "smollm3", "phi3", "exaone4", "gemma3", "neox"]
PAIRS = [*pairs(KINDS, METHODS), ("phi3", "whole heads")]
FAMILIES = pairs([name for name in CONFIGS if "eight" not in name], ("scale", "merged", "fft"))
FAMILIES += [("qwen3_moe dense layer", method) for method in ("fft", "freeze", "lora", "llama_pro")]
FAMILIES += [("glm4_moe", "lora"), ("exaone_moe", "llama_pro"), ("qwen2_moe windows", "freeze")]
FAMILIES = [pair for pair in FAMILIES if pair not in PAIRS]
FAMILIES += [("neox", method) for method in MORE_METHODS if method.startswith("lora ")]


@pytest.fixture(scope="module", autouse=True)
def trained_together(models):
    models.train(PAIRS)


@pytest.mark.parametrize(
    ("name", "method"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.full) for pair in FAMILIES)],
)
def test_what_transformers_loads_is_the_model_that_trained(name, method, models, tmp_path):
    if (name, method) in FAMILIES:
        models.train(FAMILIES)
    model = models(name, method)
    folder = exported(model, "auto", tmp_path / "hf")
    assert_exported(model, folder)
    loaded, original = load_hf_model(folder), load_hf_model(model.base.path)
    assert type(loaded) is (ScaleForCausalLM if method == "scale" else type(original))
    assert (folder / "modeling_scale.py").exists() == (method == "scale")
    if method != "scale":  # a base of a second round is read as transformers reads it
        tokens = some_tokens(model.spec, 2, 16)
        assert_near(unwidened(open_base(folder)).logits(tokens), loaded(tokens).logits, PARITY)


def test_full_fine_tuning_and_freeze_change_what_they_train(models, tmp_path):
    loaded, original = loaded_with_base(models("llama tied", "fft"), tmp_path / "fft")
    for new, old in zip(loaded.parameters(), original.parameters(), strict=True):
        assert new.shape == old.shape
        assert not torch.equal(new, old)

    loaded, original = loaded_with_base(models("phi3", "freeze"), tmp_path / "freeze")
    of_base = original.state_dict()
    for key, tensor in loaded.state_dict().items():
        is_frozen = any(part in key for part in ("embed", "layers.0.", "layers.1."))
        assert torch.equal(tensor, of_base[key]) == is_frozen, key


def test_llama_pro_is_exported_as_a_deeper_base(models, tmp_path):
    loaded, original = loaded_with_base(models("exaone4", "llama_pro"), tmp_path / "hf")
    assert loaded.config.num_hidden_layers == 6
    for key, tensor in original.state_dict().items():
        parts = key.split(".")
        if parts[1] == "layers":
            parts[2] = str(2 * int(parts[2]))
        assert torch.equal(loaded.state_dict()[".".join(parts)], tensor), key


@pytest.mark.parametrize("format", ["scale", "merged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(format, dtype, models, tmp_path):
    model = models("llama tied", format)
    folder = exported(model, format, tmp_path / "hf", dtype)
    assert {parameter.dtype for parameter in load_hf_model(folder).parameters()} == {dtype}
    assert_exported(model, folder, rounding(48, 1, dtype))


@pytest.mark.parametrize(
    ("dtype", "purpose", "rate", "trains"),
    [
        (torch.bfloat16, "serving", 1e-4, True),
        (torch.float32, "training", 1e-4, True),
        (torch.float32, "training", 2e-5, True),
        (torch.float32, "serving", 2e-5, False),  # which the card and the log say
    ],
)
def test_a_merged_export_is_fine_tuned_by_other_tools(
    dtype, purpose, rate, trains, models, tmp_path
):
    """AdamW moves a weight by the learning rate, however small it is: channels times 2^-12 make the
    loss explode."""
    export = choose_export(models("stories260K", "merged"), "merged", dtype, purpose)
    (tmp_path / "hf").mkdir()
    write_hf_folder(tmp_path / "hf", export, models("stories260K", "merged").base.path)
    model = load_hf_model(tmp_path / "hf", torch.float32)
    optimizer, tokens, losses = (
        torch.optim.AdamW(model.parameters(), lr=rate),
        some_tokens(model.config, 2, 64),
        [],
    )
    for _ in range(8):
        losses.append(model(tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ("destroys the model" in " ".join(on_stored_scale(export))) != trains
    if trains:
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.97 * losses[0]
    else:
        assert losses[1] > losses[0]


def test_what_a_format_cannot_express_is_refused_with_the_reason(models):
    """Only the reason of the format that is asked for."""
    with pytest.raises(ConversionError) as refused:
        choose_export(models("llama tied", "fft"), "scale", torch.float32)
    _, _, said = str(refused.value).partition(": cannot be exported with --format scale: ")
    assert said == "method fft widens nothing; --format merged can"
    assert (
        choose_export(models("llama tied", "preserve separate"), "auto", torch.float32).format
        == "scale"
    )


def test_many_files_are_one_model(models, tmp_path, monkeypatch):
    model, many = models("llama tied", "merged"), tmp_path / "many"
    single = exported(model, "merged", tmp_path / "single")
    many.mkdir()
    monkeypatch.setattr(hf_write, "FILE_BYTES", 2000)
    write_hf_folder(many, choose_export(model, "merged", torch.float32), model.base.path)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    expected, found = load_hf_model(single).state_dict(), load_hf_model(many).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama tied", "exaone4"])
@torch.no_grad()
def test_padded_for_tensor_parallel_servers_it_computes_the_same(name, tp_size, models, tmp_path):
    """The heads and channels that no server could split are followed by zeros."""
    model = models(name, "odd heads")
    export = choose_export(model, "merged", torch.float32, tp_size=tp_size)
    (tmp_path / "hf").mkdir()
    write_hf_folder(tmp_path / "hf", export, model.base.path)
    assert_exported(model, tmp_path / "hf")
    padded = load_hf_model(tmp_path / "hf")
    config = padded.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    assert heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)
    assert config.intermediate_size % tp_size == 0 and config.hidden_size % heads == 0
    # They are zeros, and so are what they read and write.
    unpadded = load_hf_model(exported(model, "merged", tmp_path / "unpadded")).state_dict()
    assert any(padded.state_dict()[key].shape != value.shape for key, value in unpadded.items())
    for key, value in padded.state_dict().items():
        corner = tuple(slice(size) for size in unpadded[key].shape)
        assert value.count_nonzero() == value[corner].count_nonzero(), key
        assert torch.allclose(value[corner], unpadded[key], rtol=0.5)


def test_only_a_merged_export_of_a_widened_model_is_padded(models):
    for method, format in (("fft", "merged"), ("preserve separate", "scale")):
        with pytest.raises(ConversionError, match=f"--tensor-parallel-size 2 pads .*{format}"):
            choose_export(models("llama tied", method), "auto", torch.float32, tp_size=2)
