"""Every family in every format that can express it: what transformers loads is the model that trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pipeline.conversion import formats
from pipeline.conversion.formats import choose_export
from pipeline.conversion.hf_folder import load_exported, load_hf_model, write_hf_folder
from pipeline.conversion.modeling_scale import ScaleForCausalLM
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.model.from_hf import open_base
from tests.bases import CONFIGS
from tests.conversion.checkpoints import FFT, save_many, scale, trained, training_decoder
from tests.distributed import run_ranks
from tests.tolerances import assert_near, rounding, rounding_of
from tests.widened import some_tokens, unwidened

FAMILIES = [name for name in CONFIGS if "eight" not in name]
FEW = ["llama tied", "llama biases", "smollm3", "phi3", "exaone4", "gemma3", "neox", "neox unbiased attention"]
NOT_STOCK = {
    "neox": "LayerNorm takes one mean",
    "olmo": "one mean square over all heads",
    "gemma": "multiplies its embedding",
}
"""Why no ordinary wider model of a family exists, by the beginning of the base's name."""
STOCK_FAMILIES = [name for name in FAMILIES if not name.startswith(tuple(NOT_STOCK))]
COMPARED = ("freeze", "lora", "llama_pro")
METHODS = {
    "scale": scale("route", collaborative_modules="both"),
    "stock": scale("adapt", collaborative_modules="both", norm="base"),
    "fft": FFT,
    "freeze": {"name": "freeze", "frozen_layers": 2},
    "lora": {"name": "lora", "rank": 4, "alpha": 6},
    "llama_pro": {"name": "llama_pro", "added_layers": 3},
}
# Adapters on a part of GPT-NeoX's fused query, key and value.
PARTIAL_LORA = {
    "-".join(targets): {**METHODS["lora"], "target_modules": targets}
    for targets in (["query"], ["key", "value", "down"], ["query", "value", "output"])
}


@pytest.fixture(scope="module")
def models(base, tmp_path_factory):
    """A trained model by family and method, all saved by one process.

    Under ZeRO-1, whose steps take a tenth of ZeRO-3's: tests/checkpoint reads every stage.
    """
    folder = tmp_path_factory.mktemp("trained")
    wanted = {(name, key): METHODS[key] for key in METHODS for name in (FEW if key in COMPARED else FAMILIES)}
    wanted |= {("neox", key): method for key, method in PARTIAL_LORA.items()}
    wanted["llama", "separate"] = scale("preserve")
    whole_heads = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4}
    wanted["phi3", "whole heads"] = {**METHODS["stock"], "expansion": whole_heads}
    places = {pair: folder / "-".join(pair).replace(" ", "_") for pair in wanted}
    run_ranks(save_many, 1, [(base(name).path, wanted[name, key], places[name, key]) for name, key in wanted])
    return lambda name, key: trained(base(name).path, places[name, key])


def exported(model: TrainedModel, format: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    write_hf_folder(folder, choose_export(model, format, dtype), model.base.path)
    return folder


@torch.no_grad()
def assert_exported(model: TrainedModel, folder: Path, bound: float | None = None) -> None:
    """The folder's logits are the training model's, within `bound`: by default the rounding in fp32."""
    tokens = some_tokens(model.spec, 2, 16)
    expected = training_decoder(model).logits(tokens)
    assert expected.std() > 0.5
    found = load_exported(folder, model.base.path, torch.float32)(tokens).logits
    assert_near(found, expected, rounding_of(model.spec) if bound is None else bound)


@pytest.mark.parametrize("name", FAMILIES)
def test_scale_format_of_every_family(name, models, tmp_path):
    model = models(name, "scale")
    folder = exported(model, "scale", tmp_path / "hf")
    assert isinstance(load_hf_model(folder), ScaleForCausalLM)
    assert_exported(model, folder)


@pytest.mark.parametrize(("name", "method"), [*((name, "stock") for name in STOCK_FAMILIES), ("phi3", "whole heads")])
def test_stock_format_is_the_bases_own_class_only_wider(name, method, models, tmp_path):
    model, folder = models(name, method), tmp_path / "hf"
    loaded, _ = loaded_with_base(model, folder)
    assert loaded.config.hidden_size >= model.spec.widths.hidden_size + 12
    assert not (folder / "modeling_scale.py").exists()
    assert_exported(model, folder)
    tokens = some_tokens(model.spec, 2, 16)  # a base of a second round is read as transformers reads it
    assert_near(unwidened(open_base(folder)).logits(tokens), loaded(tokens).logits, rounding_of(loaded.config))


def loaded_with_base(model: TrainedModel, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model exported in a format of its own choice, and its base; both of the same class."""
    exported(model, "auto", folder)
    loaded, original = (load_hf_model(path) for path in (folder, model.base.path))
    assert type(loaded) is type(original)
    return loaded, original


@pytest.mark.parametrize("name", FAMILIES)
def test_full_fine_tuning_is_exported_as_the_base_is_stored(name, models, tmp_path):
    model, folder = models(name, "fft"), tmp_path / "hf"
    loaded, original = loaded_with_base(model, folder)
    pairs = zip(loaded.parameters(), original.parameters(), strict=True)
    assert all(new.shape == old.shape and not torch.equal(new, old) for new, old in pairs)
    assert_exported(model, folder)


@pytest.mark.parametrize("name", FEW)
def test_freeze_is_exported_with_only_the_upper_layers_changed(name, models, tmp_path):
    model, folder = models(name, "freeze"), tmp_path / "hf"
    loaded, original = loaded_with_base(model, folder)
    pairs = zip(loaded.named_parameters(), original.parameters(), strict=True)
    moved = {key for (key, parameter), other in pairs if not torch.equal(parameter, other)}
    frozen = ("embed", "layers.0.", "layers.1.", *(["lm_head"] if "tied" in name else []))
    assert {key for key, _ in loaded.named_parameters() if key not in moved} == {
        key for key, _ in loaded.named_parameters() if any(part in key for part in frozen) and "embed_out" not in key
    }
    assert_exported(model, folder)


@pytest.mark.parametrize("name", FEW)
def test_llama_pro_is_exported_as_a_deeper_base(name, models, tmp_path):
    model, folder = models(name, "llama_pro"), tmp_path / "hf"
    loaded, original = loaded_with_base(model, folder)
    assert loaded.config.num_hidden_layers == 6
    kept = {key: tensor for key, tensor in original.state_dict().items() if ".layers." not in key}
    for key, tensor in kept.items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    for layer in range(3):
        layers = loaded.base_model.layers[2 * layer], original.base_model.layers[layer]
        pairs = zip(*(module.parameters() for module in layers), strict=True)
        assert all(torch.equal(new, old) for new, old in pairs)
    assert_exported(model, folder)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("format", ["peft", "auto"])
def test_lora_is_exported_as_adapters_for_peft_or_merged(format, name, models, tmp_path):
    model = models(name, "lora")
    folder = exported(model, format, tmp_path / "hf")
    assert (folder / "adapter_model.safetensors").exists() == (format == "peft")
    assert (folder / "model.safetensors").exists() == (format == "auto")
    assert_exported(model, folder)
    tokens = some_tokens(model.spec, 2, 16)
    base = load_hf_model(model.base.path, torch.float32)
    moved = load_exported(folder, model.base.path, torch.float32)
    assert (moved(tokens).logits - base(tokens).logits).abs().max() > 0.05, "the adapters change nothing"


@pytest.mark.parametrize("key", PARTIAL_LORA)
def test_adapters_of_a_part_of_a_fused_map(key, models, tmp_path):
    model, targets = models("neox", key), PARTIAL_LORA[key]["target_modules"]
    for format in ("peft", "stock"):
        assert_exported(model, exported(model, format, tmp_path / format))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert "query_key_value" in config["target_modules"]
    parts = len({"query", "key", "value"} & set(targets))
    assert config["rank_pattern"] == ({} if parts == 1 else {"query_key_value": 4 * parts})


def test_formats_that_do_not_fit_the_method_are_refused(models):
    for method, format in (
        ("fft", "peft"),
        ("scale", "peft"),
        ("llama_pro", "peft"),
        ("lora", "scale"),
        ("freeze", "scale"),
    ):
        with pytest.raises(ConversionError, match=f"method {method}"):
            choose_export(models("llama tied", method), format, torch.float32)


def test_adapters_are_not_written_without_peft_to_verify_them(models, monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(ConversionError, match="pip install peft"):
        choose_export(models("neox", "lora"), "peft", torch.float32)


@pytest.mark.parametrize("format", ["scale", "stock"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(format, dtype, models, tmp_path):
    model = models("llama tied", format)
    folder = exported(model, format, tmp_path / "hf", dtype)
    loaded = load_hf_model(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert_exported(model, folder, rounding(48, 1, dtype))


def test_what_stock_cannot_express_is_refused_with_the_reason(models):
    cases = [(name, NOT_STOCK[start]) for name in FAMILIES for start in NOT_STOCK if name.startswith(start)]
    for name, method, reason in [*((name, "stock", reason) for name, reason in cases), ("llama", "scale", "route")]:
        with pytest.raises(ConversionError, match=reason):
            choose_export(models(name, method), "stock", torch.float32)
    with pytest.raises(ConversionError, match="but as stock;"):
        choose_export(models("llama", "fft"), "scale", torch.float32)


def test_separate_norms_are_not_stock(models):
    with pytest.raises(ConversionError, match="separate"):
        choose_export(models("llama", "separate"), "stock", torch.float32)
    assert choose_export(models("llama", "separate"), "auto", torch.float32).format == "scale"


@pytest.mark.parametrize("file_bytes", [2_000, 20_000])
def test_many_files_are_one_model(file_bytes, models, tmp_path):
    model = models("llama tied", "stock")
    single = exported(model, "stock", tmp_path / "single")
    many = tmp_path / "many"
    many.mkdir()
    write_hf_folder(many, choose_export(model, "stock", torch.float32), model.base.path, file_bytes=file_bytes)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    expected, found = load_hf_model(single).state_dict(), load_hf_model(many).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
