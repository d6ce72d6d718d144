"""The tiny copy of a configuration: small widths, and whatever decides how a layer is built."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from pipeline.extensions.hosted.discovery import tiny_copy
from pipeline.extensions.hosted.discovery.tiny_copy import (
    FIRST_SPECIAL_TOKEN,
    HEAD_DIM,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    build_tiny_copy,
    model_class_of,
    shrunk,
)
from pipeline.extensions.hosted.structure import UnsupportedStructureError


def test_layers_and_what_is_in_them_stay():
    config = CONFIG_MAPPING["qwen3_next"](num_hidden_layers=8)
    small = shrunk(config)
    assert small.layer_types == config.layer_types
    assert small.hidden_size == HIDDEN_SIZE and small.vocab_size == VOCAB_SIZE
    assert small.num_experts == 8 and config.num_experts == 512


def test_the_relations_of_numbers_stay():
    multi_head = shrunk(CONFIG_MAPPING["llama"](num_key_value_heads=32))
    assert multi_head.num_key_value_heads == multi_head.num_attention_heads
    grouped = shrunk(CONFIG_MAPPING["llama"](num_key_value_heads=8))
    assert grouped.num_key_value_heads < grouped.num_attention_heads
    latent = shrunk(CONFIG_MAPPING["deepseek_v3"]())
    assert latent.qk_head_dim == latent.qk_nope_head_dim + latent.qk_rope_head_dim
    state_space = shrunk(CONFIG_MAPPING["mamba2"]())
    inner = state_space.expand * state_space.hidden_size
    assert state_space.num_heads * state_space.head_dim == inner


def test_a_model_that_is_smaller_keeps_its_widths_and_gets_the_vocabulary_of_the_probes():
    config = CONFIG_MAPPING["llama"](
        vocab_size=97, hidden_size=32, num_attention_heads=4, num_hidden_layers=1
    )
    small = shrunk(config)
    assert small.hidden_size == 32 and small.vocab_size == VOCAB_SIZE


def test_rotary_lists_are_as_long_as_half_of_what_is_rotated():
    factors = [1.0] * 48
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 4096,
    }
    phi3 = shrunk(CONFIG_MAPPING["phi3"](rope_parameters=rope))
    assert len(phi3.rope_parameters["short_factor"]) == HEAD_DIM // 2
    sections = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {"rope_parameters": sections}
    qwen = shrunk(CONFIG_MAPPING["qwen2_vl"](text_config=text)).get_text_config()
    assert sum(qwen.rope_parameters["mrope_section"]) == HEAD_DIM // 2


def test_special_tokens_are_within_the_small_vocabulary_and_differ():
    config = CONFIG_MAPPING["gemma3"]()
    small = shrunk(config)
    ids = [small.boi_token_index, small.eoi_token_index, small.image_token_index]
    assert len(set(ids)) == 3
    assert all(FIRST_SPECIAL_TOKEN <= token < VOCAB_SIZE for token in ids)


def test_a_text_class_gets_the_configuration_of_the_text():
    wrapper = CONFIG_MAPPING["qwen3_5"]()
    model_class, config = model_class_of(wrapper)
    assert model_class.__name__ == "Qwen3_5ForCausalLM"
    assert config.model_type == "qwen3_5_text"


def test_the_tiny_copy_is_in_fp32_frozen_and_in_eval_mode():
    model = build_tiny_copy(CONFIG_MAPPING["llama"](num_hidden_layers=1, dtype="bfloat16"))
    assert not model.training
    for parameter in model.parameters():
        assert str(parameter.dtype) == "torch.float32" and not parameter.requires_grad


def test_a_tiny_copy_that_is_not_small_is_refused_before_it_takes_memory(monkeypatch):
    monkeypatch.setattr(tiny_copy, "_MOST_PARAMETERS", 1000)
    with pytest.raises(UnsupportedStructureError, match=r"has \d+ parameters, at most 1000"):
        build_tiny_copy(CONFIG_MAPPING["llama"](num_hidden_layers=1))
