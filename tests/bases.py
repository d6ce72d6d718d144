"""Small random base models of every supported kind, as Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    ExaoneMoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    SolarOpenConfig,
)
from transformers.utils import logging

from pipeline.model.from_hf import hf_config, loading_options
from tests.files import change_json

logging.disable_progress_bar()

STORIES = Path(__file__).parents[1] / "examples" / "data" / "models" / "stories260K"

_LLAMA = {
    "vocab_size": 97,  # prime: it divides over no number of ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_QUARTER_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_WHOLE_ROPE = {**_QUARTER_ROPE, "partial_rotary_factor": 1.0}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.5, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
}
_WINDOWS = ["sliding_attention", "sliding_attention"]
_PHI3 = {**_LLAMA, "pad_token_id": None, "original_max_position_embeddings": 32}
_QWEN3_MOE = {
    **_LLAMA,
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_QWEN2_MOE = {**_QWEN3_MOE, "shared_expert_intermediate_size": 28}
_SIGMOID_MOE = {
    **{**_LLAMA, "head_dim": 16, "moe_intermediate_size": 20, "num_experts_per_tok": 2},
    **{"n_routed_experts": 6, "routed_scaling_factor": 1.5},
}
_SOLAR = {key: value for key, value in _SIGMOID_MOE.items() if key != "intermediate_size"}
_EXAONE_MOE = {key: value for key, value in _SIGMOID_MOE.items() if key != "n_routed_experts"} | {
    "num_experts": 6
}
_NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}

CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_LLAMA),
    "llama tied": LlamaConfig(**{**_LLAMA, "tie_word_embeddings": True}),
    "llama multi-head": LlamaConfig(**{**_LLAMA, "num_key_value_heads": 4}),
    "llama one kv head": LlamaConfig(**{**_LLAMA, "num_key_value_heads": 1}),
    "llama3 rope": LlamaConfig(**_LLAMA, rope_parameters=_LLAMA3_ROPE),
    "llama linear rope": LlamaConfig(**_LLAMA, rope_parameters=_LINEAR_ROPE),
    "llama biases": LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True),
    "llama head_dim": LlamaConfig(**_LLAMA, head_dim=16),
    "llama heads that do not divide": hf_config(
        {
            **_LLAMA,
            "model_type": "llama",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
        }
    ),
    "llama gelu": LlamaConfig(**_LLAMA, hidden_act="gelu_pytorch_tanh"),
    "mistral": MistralConfig(**_LLAMA, sliding_window=None),
    "mistral window": MistralConfig(**_LLAMA, sliding_window=9),
    "ministral": MinistralConfig(
        **_LLAMA, head_dim=16, sliding_window=12, layer_types=[*_WINDOWS, "full_attention"]
    ),
    "qwen2": Qwen2Config(**_LLAMA),
    "qwen2 window": Qwen2Config(
        **_LLAMA, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**_LLAMA, head_dim=16),
    "qwen3 tied": Qwen3Config(
        **{**_LLAMA, "tie_word_embeddings": True}, head_dim=8, attention_bias=True
    ),
    "llama yarn": LlamaConfig(**_LLAMA, rope_parameters=_YARN_ROPE),
    "llama partial": LlamaConfig(
        **_LLAMA, rope_parameters={**_WHOLE_ROPE, "partial_rotary_factor": 0.5}
    ),
    "smollm3": SmolLM3Config(**_LLAMA, pad_token_id=None, no_rope_layer_interval=2),
    "phi3": Phi3Config(**_PHI3, rope_parameters=_LONGROPE),
    "phi3 partial": Phi3Config(
        **_PHI3,
        sliding_window=15,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    "olmo2": Olmo2Config(**_LLAMA, pad_token_id=None),
    "olmo3": Olmo3Config(
        **_LLAMA,
        pad_token_id=None,
        sliding_window=10,
        layer_types=[*_WINDOWS, "full_attention"],
        rope_parameters={
            "full_attention": _YARN_ROPE,
            "sliding_attention": {**_WHOLE_ROPE, "rope_theta": 5e5},
        },
    ),
    "exaone4": Exaone4Config(**_LLAMA, head_dim=16, sliding_window=10, sliding_window_pattern=2),
    "exaone4 global": Exaone4Config(
        **_LLAMA, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "gemma2": Gemma2Config(
        **{**_LLAMA, "tie_word_embeddings": True},
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=11,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        pad_token_id=None,
    ),
    "gemma3": Gemma3TextConfig(
        **_LLAMA,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=11,
        sliding_window_pattern=2,
        pad_token_id=None,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "neox": GPTNeoXConfig(**_NEOX, rope_parameters=_QUARTER_ROPE),
    "neox sequential": GPTNeoXConfig(
        **_NEOX, use_parallel_residual=False, rope_parameters=_QUARTER_ROPE
    ),
    "neox whole rotary": GPTNeoXConfig(**_NEOX, rope_parameters=_WHOLE_ROPE),
    "neox tied": GPTNeoXConfig(
        **{**_NEOX, "tie_word_embeddings": True}, rope_parameters=_QUARTER_ROPE
    ),
    "neox unbiased attention": GPTNeoXConfig(
        **_NEOX, attention_bias=False, rope_parameters=_QUARTER_ROPE
    ),
    "mixtral": MixtralConfig(
        **_LLAMA, num_local_experts=4, num_experts_per_tok=3, sliding_window=9
    ),
    "olmoe": OlmoeConfig(
        **_LLAMA, num_experts=5, num_experts_per_tok=5, pad_token_id=None, eos_token_id=None
    ),
    "qwen3_moe": Qwen3MoeConfig(**_QWEN3_MOE, norm_topk_prob=True),
    "qwen3_moe one expert": Qwen3MoeConfig(
        **{**_QWEN3_MOE, "num_experts_per_tok": 1, "tie_word_embeddings": True}
    ),
    "qwen3_moe dense layers": Qwen3MoeConfig(
        **_QWEN3_MOE, decoder_sparse_step=2, attention_bias=True
    ),
    "qwen3_moe dense layer": Qwen3MoeConfig(**_QWEN3_MOE, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**_QWEN2_MOE, norm_topk_prob=True),
    "qwen2_moe windows": Qwen2MoeConfig(
        **_QWEN2_MOE, mlp_only_layers=[0], use_sliding_window=True, sliding_window=7, qkv_bias=False
    ),
    "glm4_moe": Glm4MoeConfig(**_SIGMOID_MOE, first_k_dense_replace=1, attention_bias=True),
    "glm4_moe normed heads": Glm4MoeConfig(
        **_SIGMOID_MOE, first_k_dense_replace=0, use_qk_norm=True, norm_topk_prob=False
    ),
    "solar_open": SolarOpenConfig(**_SOLAR, n_shared_experts=2),
    "exaone_moe": ExaoneMoeConfig(
        **_EXAONE_MOE, first_k_dense_replace=1, sliding_window=7, sliding_window_pattern=2
    ),
    # On two ranks each shard has whole blocks of nf4.
    "llama eight heads, wide": LlamaConfig(
        **{
            **_LLAMA,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
        }
    ),
    # For tensor parallelism: as many heads as ranks, and more.
    "llama eight heads": LlamaConfig(
        **{**_LLAMA, "num_attention_heads": 8, "num_hidden_layers": 2}
    ),
    "neox eight heads": GPTNeoXConfig(
        **{**_NEOX, "num_attention_heads": 8, "num_hidden_layers": 2}, rope_parameters=_WHOLE_ROPE
    ),
}

FEATURES = (
    *(
        "mistral window",
        "qwen3",
        "smollm3",
        "phi3",
        "olmo2",
        "olmo3",
        "exaone4",
        "gemma2",
        "gemma3",
    ),
    "qwen3_moe dense layer",
)
"""Of `CONFIGS`, those whose layers differ most from Llama's and GPT-NeoX's."""


MIXTURES = tuple(
    name for name in CONFIGS if CONFIGS[name].model_type.endswith(("moe", "mixtral", "solar_open"))
)


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A transformers model whose every parameter, biases and gains too, is random and large enough
    to matter."""
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    biases = (
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    )
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *biases):
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_gain else 0.2 * noise)
    return model


def save_base(name: str, folder: Path, **changes: Any) -> Path:
    """Writes the model `name` of `CONFIGS` to `folder`, with some of its config changed."""
    values = {**CONFIGS[name].to_dict(), **changes}
    model = random_model(hf_config(values))
    if (
        model.config.hidden_size % model.config.num_attention_heads
    ):  # transformers runs such a model, and saves none
        model.config.hidden_size = model.config.num_attention_heads
    model.save_pretrained(folder)
    change_json(folder / "config.json", hidden_size=values["hidden_size"])
    return folder


def copy_tokenizer(folder: Path) -> Path:
    """Gives the folder stories260K's tokenizer."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORIES / file, folder)
    return folder


def save_stories_with_a_token_more(folder: Path) -> Path:
    """Writes stories260K to `folder`, its tokenizer with an id for which the model has no row."""
    shutil.copytree(STORIES, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["한국"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def reference(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in `path` as transformers runs it."""
    options = loading_options(json.loads((path / "config.json").read_text()))
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options).eval()
