"""Small GGUF files of random models with SmolLM2's kind of tokenizer, as llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = ("in", "on", "ĠĠ", "ĊĊ")
MERGES = ["i n", "o n", "Ġ Ġ", "Ċ Ċ"]
TOKENS = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), *_WORDS]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_llama() -> LlamaForCausalLM:
    """A Llama whose sizes divide into GGUF's blocks of 32, its output tied to the embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def random_gemma2(layers: int) -> Gemma2ForCausalLM:
    """A Gemma 2 whose size divided by its heads is not the size of a head, as that of 27B."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
    )
    return Gemma2ForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    pattern: str = "smollm",
    entries: dict[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Writes the model as llama.cpp's converter does; matrices are of the type `kind`.

    Args:
        pattern: the tokenizer's `tokenizer.ggml.pre`.
        entries: further whole numbers, fractions and texts of the metadata.
        tensors: tensors beside the model's, or in place of them; None: left out.
    """
    config = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pattern)
    writer.add_token_list(TOKENS)
    ordinary = len(TOKENS) - len(SPECIAL_TOKENS)
    writer.add_token_types(
        [TokenType.CONTROL] * len(SPECIAL_TOKENS) + [TokenType.NORMAL] * ordinary
    )
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for key, value in (entries or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in (_tensors(model) | dict(tensors or {})).items():
        if tensor is None:
            continue
        if tensor.ndim > 1:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray | None]:
    config = model.config
    is_llama = config.model_type == "llama"
    found = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        queries, keys = attention.q_proj.weight, attention.k_proj.weight
        of_layer = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": queries,
            "attn_k": keys,
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_gate": layer.mlp.gate_proj.weight,
            "ffn_up": layer.mlp.up_proj.weight,
            "ffn_down": layer.mlp.down_proj.weight,
        }
        if is_llama:
            of_layer["attn_q"] = _interleaved(queries, config.num_attention_heads)
            of_layer["attn_k"] = _interleaved(keys, config.num_key_value_heads)
            of_layer["ffn_norm"] = layer.post_attention_layernorm.weight
        else:
            of_layer["post_attention_norm"] = layer.post_attention_layernorm.weight
            of_layer["ffn_norm"] = layer.pre_feedforward_layernorm.weight
            of_layer["post_ffw_norm"] = layer.post_feedforward_layernorm.weight
        found |= {f"blk.{number}.{name}.weight": weight for name, weight in of_layer.items()}
    values = {name: weight.detach().numpy() for name, weight in found.items()}
    if not is_llama:  # Gemma adds 1 to its norms, llama.cpp before
        values |= {name: value + 1 for name, value in values.items() if value.ndim == 1}
    return values


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head in llama.cpp's order: its rotary embedding rotates neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape).contiguous()
