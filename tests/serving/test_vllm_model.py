"""The class for vLLM where vLLM is not installed: built as vLLM does, with exact attention in its
kernels' place."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from pipeline.hf.load import load_hf_model
from pipeline.parallel.parameters import default_dtype
from pipeline.scale_math import NEVER
from tests.bases import reference
from tests.conversion.checkpoints import training_decoder
from tests.conversion.exports import exported
from tests.extensions.combination.test_combined import BASE_TOKENS, export
from tests.extensions.gate.gates import random_gate
from tests.serving.stand_ins import vllm_config, with_stand_ins
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens

pytestmark = pytest.mark.full


@pytest.fixture
def vllm_model():
    """The module, without registering anything with transformers."""
    with with_stand_ins() as module:
        yield module


def built(vllm_model, folder, loaded):
    """The class for vLLM in the type of `loaded`, the same folder in transformers, filled as vLLM
    does."""
    config = vllm_config(copy.deepcopy(loaded.config))
    with default_dtype(loaded.dtype):  # as vLLM builds a model
        served = vllm_model.ScaleForVllm(vllm_config=config)
    assert len(served.load_weights(load_file(folder / "model.safetensors").items())) > 50
    return served


@torch.no_grad()
def test_soft_capped_scores_are_those_of_the_export(vllm_model, exports):
    folder, _ = exports("gemma2", "adapt separate")
    loaded = load_hf_model(folder)
    served, tokens = built(vllm_model, folder, loaded), some_tokens(loaded.config, 10)
    expected = loaded(tokens.unsqueeze(0)).logits[0]
    assert_near(served.compute_logits(served(tokens, torch.arange(10))), expected, PARITY)
    served.model.layers[0].attention.served.softcap = None
    assert (served.compute_logits(served(tokens, torch.arange(10))) - expected).abs().max() > 0.01


@torch.no_grad()
def test_in_sixteen_bits_the_gate_decides_as_the_export_does(vllm_model, models, tmp_path):
    model = models("stories260K", "adapt separate")
    decoder = training_decoder(model)
    gate = random_gate(decoder, some_tokens(decoder.spec, 4, 24), features="token")
    gate = replace(gate, open_ids=(5, 9))
    folder = exported(replace(model, gate=gate), "scale", tmp_path / "hf", torch.bfloat16)
    loaded = load_hf_model(folder)
    served = built(vllm_model, folder, loaded)

    stream = torch.randn(
        1, 4096, decoder.spec.widths.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    stream = stream.bfloat16()
    expected = loaded.token_gate(stream, None, None, None)
    assert torch.equal(served.model.token_gate(stream, None, None, None), expected)
    assert served.model.token_gate.is_open_id.nonzero().flatten().tolist() == [5, 9]
    rounded = copy.deepcopy(loaded.token_gate)
    for tensor in (rounded.mean, rounded.std, rounded.weight):
        tensor.copy_(tensor.bfloat16())
    assert not torch.equal(rounded(stream, None, None, None), expected), (
        "the type of the gate decides nothing here"
    )
    tokens = some_tokens(loaded.config, 20)
    logits = served.compute_logits(served(tokens, torch.arange(20)))
    assert torch.allclose(logits, loaded(tokens.unsqueeze(0)).logits[0], atol=0.1)
    with pytest.raises(ValueError, match=r"prompt embeddings: the gate opens .*; give token ids"):
        served(None, torch.arange(20), inputs_embeds=served.embed_input_ids(tokens))


def test_what_vllm_would_get_wrong_is_refused(vllm_model):
    config = vllm_model.ScaleConfig()
    assert vllm_model.unsupported_reason(config, 1, False) is None
    assert "one rank" in vllm_model.unsupported_reason(config, 2, False)
    assert "--quantization" in vllm_model.unsupported_reason(config, 1, True)
    config.gate_layer, config.gate_features = 1, "token+running_mean"
    assert "running mean" in vllm_model.unsupported_reason(config, 1, False)
    config.gate_layer, config.rotary = None, [{"context": 64}]
    assert "frequencies" in vllm_model.unsupported_reason(config, 1, False)
    config.rotary, config.mixture = [], {"experts": 4}
    assert "mixture of experts" in vllm_model.unsupported_reason(config, 1, False)
    config.mixture, config.gate_layer, config.l_fp = None, 2, 1
    config.gate_features = "token"
    assert "run twice" in vllm_model.unsupported_reason(config, 1, False)


# On one path; LoRA, whose layers below the gate run on two paths of as many heads each.
OWN = [("llama", "own adapt"), ("neox", "own preserve"), ("neox", "own lora")]


@torch.no_grad()
@pytest.mark.parametrize(("name", "method"), OWN)
def test_weights_of_open_tokens_own_give_the_logits_of_the_export(
    name, method, vllm_model, exports
):
    folder, decoder = exports(name, method, features="token")
    loaded = load_hf_model(folder)
    served = built(vllm_model, folder, loaded)
    tokens = some_tokens(loaded.config, 20)
    opens = decoder.gate.is_open(decoder.base_stream(tokens[None], layer=decoder.gate.layer))
    assert opens.any() and not opens.all()
    found = served.compute_logits(served(tokens, torch.arange(20)))
    assert_near(found, loaded(tokens.unsqueeze(0)).logits[0], PARITY)
    twice = [layer.attention.served.heads for layer in served.model.layers]
    assert (len(set(twice)) == 2) == (method == "own lora")
    with pytest.raises(ValueError, match=r"prompt embeddings: .*; give token ids"):
        served(None, torch.arange(20), inputs_embeds=served.embed_input_ids(tokens))


@torch.no_grad()
@pytest.mark.parametrize(("name", "method"), OWN)
def test_a_shut_text_has_the_bases_logits(name, method, vllm_model, exports, base):
    folder, _ = exports(name, method, features="token", opens="never")
    loaded = load_hf_model(folder)
    served = built(vllm_model, folder, loaded)
    tokens = some_tokens(loaded.config, 20)
    found = served.compute_logits(served(tokens, torch.arange(20)))
    for key, parameter in served.model.named_parameters():
        if any(part in key for part in (".own.", ".adapter.", "own_rows", "own_input.rows")):
            parameter.zero_()
    assert torch.equal(served.compute_logits(served(tokens, torch.arange(20))), found)
    expected = reference(base(name).path)(tokens.unsqueeze(0)).logits[0]
    assert_near(found, expected, PARITY)


@torch.no_grad()
def test_no_new_token_follows_one_that_the_gate_has_closed(vllm_model, tmp_path):
    folder = export(tmp_path / "hf", "pieces")
    loaded = load_hf_model(folder)
    served = built(vllm_model, folder, loaded)
    tokens = torch.randint(3, BASE_TOKENS + 18, (40,), generator=torch.Generator().manual_seed(4))
    scores = []
    loaded.token_gate.register_forward_hook(lambda gate, read, _: scores.append(gate.scores(*read)))
    loaded(tokens.unsqueeze(0), output_hidden_states=True)
    for model in (loaded, served.model):
        model.token_gate.threshold = float(scores[0].median())
    expected = loaded(tokens.unsqueeze(0)).logits[0]
    found = served.compute_logits(served(tokens, torch.arange(40)))
    assert_near(found, expected, PARITY)
    is_impossible = found[:, BASE_TOKENS] == NEVER
    assert is_impossible.any() and not is_impossible.all()
