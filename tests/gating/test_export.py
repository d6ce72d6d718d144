"""The formats and the type of an export with a gate; what it computes is in tests/conversion/test_generate.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from pipeline.conversion.formats import choose_export
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.errors import ConversionError
from tests.conversion.checkpoints import training_decoder
from tests.conversion.exports import exported
from tests.gating.gates import random_gate
from tests.widened import some_tokens


def test_a_gate_leaves_in_the_scale_format_alone_and_in_fp32(models, tmp_path):
    model = models("llama", "preserve")
    decoder = training_decoder(model)
    gate = random_gate(decoder, some_tokens(decoder.spec, 4, 24))
    gated = replace(model, gate=gate)
    assert choose_export(model, "auto", torch.float32).format == "stock"
    with pytest.raises(ConversionError, match="--without-gate"):
        choose_export(gated, "stock", torch.float32)

    folder = exported(gated, "auto", tmp_path / "hf", torch.bfloat16)
    loaded, stored = load_hf_model(folder), load_file(folder / "model.safetensors")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in gate.tensors.items():
        assert stored[f"token_gate.{name}"].dtype == torch.float32
        assert torch.equal(stored[f"token_gate.{name}"], tensor)
        assert torch.equal(loaded.token_gate.get_parameter(name), tensor)
