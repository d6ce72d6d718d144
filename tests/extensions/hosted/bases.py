"""Small random bases of kinds that only transformers computes, as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto import CONFIG_MAPPING

from pipeline.config.method import Initialisers, Lora, ScaleMethod
from pipeline.extensions.hosted.decoder import HostedDecoder
from pipeline.extensions.hosted.folder import HostedFolder
from pipeline.extensions.hosted.initial_expansion import initial_hosted_expansion
from pipeline.methods.registry import method_for
from pipeline.model.bases import load_base, open_base
from pipeline.model.causal_decoder import ActivationCheckpointing
from pipeline.model.from_hf import is_base
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.topology import SINGLE
from tests.bases import copy_tokenizer, random_model
from tests.widened import SEED, scale_settings, shake

ROWS = 600
"""Of the embedding: more than the tokenizer of stories260K has ids."""
_COMMON: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_MIXTURE = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3_moe": ("qwen3_moe", {**_MIXTURE, "num_experts": 6, "head_dim": 16}),
    # A factor on the logits, on residuals and on the embedding; tied.
    "granite": (
        "granite",
        {
            "logits_scaling": 3.0,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    # Soft-capped logits, norms before and after.
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8}),
    # Latent attention; the first layer is dense.
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_MIXTURE,
            **_LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    # Parallel residual, LayerNorm, a bias at the output.
    "phi": ("phi", {}),
    # Learned positions, linear maps stored [in, out].
    "gpt2": ("gpt2", {"n_positions": 128, "n_inner": 48}),
    # Linear attention in two layers of three.
    "qwen3_next": (
        "qwen3_next",
        {**_MIXTURE, **_DELTA, "num_experts": 6, "shared_expert_intermediate_size": 20},
    ),
    # A state space alone: no FFN, no heads.
    "mamba": ("mamba", {"state_size": 8, "time_step_rank": 4}),
}

WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
}
"""A kind with a window in every layer, so that a cache of fixed size is as short as the window."""

PARTLY_FP32: dict[str, tuple[str, dict[str, Any]]] = {
    # Experts of multiples of 32 channels, as its 4 bits need them; attention sinks.
    "gpt_oss": (
        "gpt_oss",
        {
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_intermediate_size": 20, "moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1},
    ),
}
"""Kinds of which transformers keeps parameters in fp32 in a model of 16 bits (`gpt_oss`: of fp16
alone)."""

PICTURE_TOKEN = 5
"""What stands for a picture in a text of `gemma3`, four times; its pictures have 28 x 28 pixels."""
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma3_config() -> PretrainedConfig:
    """A Gemma 3 with its vision tower."""
    text = {**_COMMON, "head_dim": 16, "sliding_window": 8}
    return CONFIG_MAPPING["gemma3"](
        text_config=text,
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=PICTURE_TOKEN,
        boi_token_index=6,
        eoi_token_index=7,
    )


def hosted_config(name: str) -> PretrainedConfig:
    if name == "gemma3":
        return gemma3_config()
    model_type, changes = (KINDS | WINDOWED | PARTLY_FP32)[name]
    return CONFIG_MAPPING[model_type](**{**_COMMON, **changes})


def save_hosted(name: str, folder: Path) -> Path:
    """Writes a base of these kinds, or `gemma3`, to `folder`, with the tokenizer of
    stories260K."""
    random_model(hosted_config(name)).save_pretrained(folder)
    return copy_tokenizer(folder)


@cache
def opened(folder: Path) -> HostedFolder:
    base = open_base(folder, "transformers")
    assert isinstance(base, HostedFolder)
    return base


def saved_in(folder: Path) -> Callable[[str], HostedFolder]:
    """Opens a base by its kind, written to `folder` when it is first asked for."""
    save = cache(lambda kind: save_hosted(kind, folder / kind))
    return lambda kind: opened(save(kind))


def by_transformers(base: HostedFolder, dtype: torch.dtype = torch.float32) -> Any:
    """The base as any user loads it."""
    return AutoModelForCausalLM.from_pretrained(base.path, dtype=dtype).eval()


@torch.no_grad()
def hosted(
    base: HostedFolder,
    variant: str = "adapt",
    *,
    noise: float = 0.0,
    activation_checkpointing: ActivationCheckpointing = "none",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> HostedDecoder:
    """`base` widened at its initial expansion, plus `noise` (a standard deviation) on all that
    trains. Where the method has own rows, every other token has one.
    """
    settings: ScaleMethod | Lora
    if variant == "lora":
        settings = Lora(name="lora", rank=2, **changes)
    else:
        if variant == "adapt":
            changes = {"collaborative_modules": "both", **changes}
        settings = scale_settings(variant, **changes)
    own_tokens: tuple[int, ...] | None = None
    if settings.open_rows is not None:
        own_tokens = tuple(range(0, base.spec.vocab_size, 2))
    method = method_for(settings, Path("unread"), SEED, own_tokens)
    with default_dtype(dtype):
        model = method.build(base.spec, SINGLE, activation_checkpointing)
    assert isinstance(model, HostedDecoder)
    load_base(model, base)
    parameters = dict(model.named_parameters())
    names = {name for name in parameters if not is_base(name)}
    initialisers = settings.initialisers if isinstance(settings, ScaleMethod) else Initialisers()
    blocks = initial_hosted_expansion(model, model.base, names, initialisers, SEED)
    for name, block in blocks:
        parameters[name].copy_(block)
    shake(model, noise)
    return model
