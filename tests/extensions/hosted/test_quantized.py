"""Checkpoints that are published in FP8 or MXFP4: dequantized when they are loaded."""

from __future__ import annotations

import logging
import shutil

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.errors import BaseModelError
from pipeline.model.bases import open_base, read_spec
from tests.bases import copy_tokenizer, random_model
from tests.extensions.hosted.bases import hosted, hosted_config, save_hosted
from tests.files import change_json
from tests.widened import some_tokens

pytestmark = pytest.mark.full

BLOCK = 16
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _in_fp8(folder):
    """Stores the matrices of attention and FFNs in e4m3 with a scale for each block, as
    DeepSeek-V3 does."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        is_map = name.endswith("_proj.weight") and "kv_a" not in name and tensor.dim() == 2
        if not is_map or tensor.shape[0] % BLOCK or tensor.shape[1] % BLOCK:
            tensors[name] = tensor.bfloat16()
            continue
        rows, columns = tensor.shape
        blocks = tensor.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        small = blocks / scales[:, None, :, None]
        tensors[name] = small.view(rows, columns).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
    save_file(tensors, file, metadata={"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    change_json(folder / "config.json", quantization_config=quantization, dtype="bfloat16")
    return folder


def _in_mxfp4(folder):
    """Stores experts in e2m1 with an exponent for each 32 columns, as GPT-OSS does."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        weight = tensor.transpose(1, 2)  # [experts, out, in]
        blocks = weight.reshape(*weight.shape[:2], -1, 32)
        exponents = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil()
        scaled = blocks / 2**exponents
        codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
        codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
        tensors[name + "_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[name + "_scales"] = (exponents.squeeze(-1) + 127).to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    change_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    random_model(hosted_config("gpt_oss")).save_pretrained(folder / "gpt_oss")
    latent = hosted_config("deepseek_v3")
    latent.moe_intermediate_size = 32  # a multiple of what torch's products of experts take
    random_model(latent).save_pretrained(folder / "deepseek_v3")
    return {
        "FP8": _in_fp8(copy_tokenizer(folder / "deepseek_v3")),
        "MXFP4": _in_mxfp4(copy_tokenizer(folder / "gpt_oss")),
    }


@pytest.mark.parametrize("stored", ["FP8", "MXFP4"])
def test_a_quantized_base_is_dequantized_and_said_to_be(stored, folders, caplog):
    base = open_base(folders[stored], "transformers")
    assert f"{stored} weights, dequantized when they are loaded" in base.spec.describe()
    with caplog.at_level(logging.INFO, logger="pipeline"):
        model = hosted(base, dtype=torch.bfloat16)
    assert f"{folders[stored]}: {stored} weights, dequantized to bfloat16" in caplog.text
    assert not any("float8" in str(parameter.dtype) for parameter in model.parameters())
    theirs = AutoModelForCausalLM.from_pretrained(folders[stored], dtype=torch.bfloat16).eval()
    weights = model.base.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    tokens = some_tokens(base.spec, 2, 24)
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits.float()
        assert torch.equal(model.logits(tokens, path="base"), expected)
        assert torch.equal(model.logits(tokens), expected)


def test_other_quantized_weights_are_refused_in_one_line(folders, tmp_path):
    folder = shutil.copytree(folders["FP8"], tmp_path / "awq")
    change_json(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(BaseModelError, match="expected one of fp8, mxfp4, which are dequantized"):
        open_base(folder, "transformers")


def test_fp8_without_accelerate_is_refused_in_one_line(folders, tmp_path, monkeypatch):
    folder = shutil.copytree(folders["FP8"], tmp_path / "copy")
    change_json(folder / "config.json", max_position_embeddings=77)  # a configuration is read once
    monkeypatch.setattr(
        "pipeline.extensions.hosted.read_spec.is_accelerate_available", lambda: False
    )
    with pytest.raises(BaseModelError, match="pip install accelerate"):
        open_base(folder, "transformers")


def test_scales_that_are_missing_are_refused(folders, tmp_path):
    folder = shutil.copytree(folders["FP8"], tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    tensors[name] = tensors[name][:0]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match="cannot be loaded by transformers"):
        open_base(folder, "transformers").whole(torch.float32)


@pytest.mark.parametrize("renamed", [None, "weight_scale"])
def test_a_matrix_whose_scale_is_not_read_is_refused(renamed, folders, tmp_path):
    """transformers takes the codes for the values of such a matrix. Other tools than DeepSeek's
    call the scale `weight_scale`."""
    folder = shutil.copytree(folders["FP8"], tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight_scale_inv"))
    scale = tensors.pop(name)
    if renamed is not None:
        tensors[name.replace("weight_scale_inv", renamed)] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=f"is in fp8: expected its scale, {name}, found none"):
        open_base(folder, "transformers").whole(torch.float32)


@pytest.mark.parametrize("infinity", ['{"__float__": "Infinity"}', "Infinity"])
def test_infinite_numbers_of_a_config_are_read(infinity, tmp_path):
    """transformers 5 and 4 write them so; neither is a number of JSON."""
    folder = save_hosted("mamba", tmp_path / "mamba")
    config = orjson.loads((folder / "config.json").read_bytes())
    text = orjson.dumps({**config, "time_step_limit": [0.0, "END"]}).decode()
    (folder / "config.json").write_text(text.replace('"END"', infinity))
    spec = read_spec(folder)
    assert spec.config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
