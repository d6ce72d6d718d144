"""`--format peft`: PEFT loads the folder onto the base, and computes the model that trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from pipeline.conversion.adapter import (
    ADAPTER_WEIGHTS,
    adapter_export,
    load_with_adapter,
    write_adapter,
)
from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.errors import ConversionError
from pipeline.hf.load import load_hf_model
from tests.conversion.checkpoints import training_decoder
from tests.conversion.exports import choose_export, exported
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens

# Fused maps in a row and head by head, of which some have no adapter.
PAIRS = [
    ("llama tied", "lora"),
    ("phi3", "lora"),
    ("neox", "lora"),
    ("neox", "lora key, value, down"),
]


@pytest.fixture(scope="module", autouse=True)
def trained_together(models):
    models.train([*PAIRS, ("stories260K", "lora")])


def adapter_of(model, folder: Path) -> Path:
    folder.mkdir()
    write_adapter(folder, adapter_export(model, torch.float32, None), model.base.path)
    return folder


@pytest.mark.parametrize(("name", "method"), PAIRS)
@torch.no_grad()
def test_peft_loads_what_trained(name, method, models, tmp_path):
    model = models(name, method)
    folder = adapter_of(model, tmp_path / "adapter")
    tokens = some_tokens(model.spec, 2, 16)
    expected = training_decoder(model).logits(tokens)

    base = load_hf_model(model.base.path, torch.float32)
    before = base(tokens).logits
    loaded = PeftModel.from_pretrained(base, folder)
    # PEFT fills factors that a folder lacks, and ignores those that it has no module for.
    stored = load_file(folder / ADAPTER_WEIGHTS)
    assert {key.replace(".default", "") for key in loaded.state_dict() if "lora_" in key} == set(
        stored
    )
    assert_near(loaded(tokens).logits, expected, PARITY)
    assert (before - expected).abs().max() > 0.05, "the adapter changes something"
    assert_near(
        load_with_adapter(model.base.path, folder, torch.float32)(tokens).logits, expected, PARITY
    )

    merged = loaded.merge_and_unload().state_dict()
    ours = load_hf_model(exported(model, "merged", tmp_path / "merged")).state_dict()
    assert merged.keys() == ours.keys()
    for key, value in ours.items():
        # To the bit where a module is one map; in a fused one zeros are added in another order.
        assert torch.allclose(merged[key], value, rtol=1e-5, atol=1e-6), key
        if method == "lora" and name == "llama tied":
            assert torch.equal(merged[key], value), key


def test_the_command_writes_a_verified_adapter_with_its_card(models, tmp_path):
    model = models("stories260K", "lora")
    done = Conversion(model.checkpoint, model.base.path, tmp_path / "adapter", format="peft")
    assert convert(done, probe_maker({}))
    assert not convert(done, probe_maker({})), "an equal request is done already"
    names = {path.name for path in done.output.iterdir()}
    assert {"adapter_config.json", ADAPTER_WEIGHTS, "README.md", "verification.json"} <= names
    assert not any(name.startswith(("model", "config")) for name in names)
    text = (done.output / "README.md").read_text()
    assert "PeftModel.from_pretrained" in text and "library_name: peft" in text
    config = json.loads((done.output / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None, "no path of this machine"
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert json.loads((done.output / "verification.json").read_text())["dtype"] == "float32"


def test_an_adapter_that_was_damaged_is_not_published(models, tmp_path, monkeypatch):
    model = models("stories260K", "lora")

    def damaged(folder, export, base):
        write_adapter(folder, export, base)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        name = next(key for key in tensors if "lora_B" in key)
        tensors[name] = -tensors[name]
        save_file(tensors, folder / ADAPTER_WEIGHTS)

    monkeypatch.setattr("pipeline.conversion.core_formats.write_adapter", damaged)
    request = Conversion(model.checkpoint, model.base.path, tmp_path / "adapter", format="peft")
    with pytest.raises(ConversionError, match="differs from the trained one"):
        convert(request, probe_maker({}))
    assert not request.output.exists()


def test_a_base_of_experts_is_refused(models):
    with pytest.raises(ConversionError, match="peft: in a mixture of experts PEFT takes"):
        choose_export(models("glm4_moe", "lora"), "peft", torch.float32)


@pytest.mark.parametrize("method", ["scale", "fft"])
def test_other_methods_are_refused_by_name(method, models):
    name = "adapt separate" if method == "scale" else method
    with pytest.raises(
        ConversionError, match=f"with --format peft: method {method} trains no adapters"
    ):
        choose_export(models("stories260K", name), "peft", torch.float32)
