"""A tiny copy of a model: the same class and the same layers with small widths and random weights.

The structure of a hosted base is found on its tiny copy, in seconds and without a weight of the
base. The copy keeps what decides how a layer is built (its type, its norms, its router, how heads
are shared) and cuts what only makes it large: widths, heads, experts, the vocabulary, windows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.errors import faults_of_library
from pipeline.extensions.hosted.mixtures import EXPERTS_OF_A_TOKEN
from pipeline.extensions.hosted.structure import UnsupportedStructureError
from pipeline.extensions.hosted.transformers_model import model_class_of

HIDDEN_SIZE = 128
HEADS = 4
HEAD_DIM = 32
VOCAB_SIZE = 256
FIRST_SPECIAL_TOKEN = 192
"""Token ids from here on stand for the base's special tokens; probes use the ids below."""
_MOST_PARAMETERS = 200_000_000
_ROTARY_PART = 16  # of a head of latent attention

_CONTEXT = (
    r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length"
    r"|max_target_positions|context_length|seq_length"
)
# The first pattern that matches an entry's whole name gives its largest value in the tiny copy.
_LARGEST: tuple[tuple[str, int], ...] = (
    (r"hidden_size_per_layer_input|laurel_rank|hc_lowrank|gated_norm_rank", 16),
    (r"router_hidden_size", 32),
    (r".*vocab_size.*|vocab_size_per_layer_input|text_vocab", VOCAB_SIZE),
    # Inner widths, another number than the stream's.
    (
        r".*intermediate_size(_mlp)?|.*ffn_dim|d_ff|dff|dim_ff|n_inner|d_inner|ffn_hidden_size"
        r"|.*_ffn_hidden_size|mlp_dim|feed_forward_size|share_expert_dim",
        192,
    ),
    # Width of the residual stream, and of what must fit it.
    (
        r"(.*_)?hidden_(size|dim)(s|_global)?|d_model|n_embd|dim|emb_dim|embed(ding)?_dim"
        r"|.*embedding_size|word_embed_proj_dim|.*projection_dim|ple_embed_dim|lru_width"
        r"|(adapter|projector)_(in|out|input|output)_dim|(vision_)?output_dim"
        r"|.*pooler_output_size|adapter_input_size|image_token_embed_dim",
        HIDDEN_SIZE,
    ),
    (r"mamba_d_ssm", 2 * HIDDEN_SIZE),
    # State spaces, whose heads times head size are twice the stream's width.
    (r"(n_mamba|mamba_n|mamba_num)_heads", 8),
    (r"mamba_(d_head|head_?dim)", HEAD_DIM),
    (r"(mamba_)?(d_state|ssm_state_size|state_size)|ssm_state_size", 16),
    (r"(time_step|mamba_dt)_rank", 8),
    (r"(mamba_)?n_groups", 2),
    (r"(mamba_)?chunk_size|block_size", 16),
    # Attention.
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r"linear_(key_|value_)?head_dim", 16),
    (r"index(er)?_head_dim", 32),
    (r"indexer_compress_ratio", 4),
    (r"index_n_heads", 4),
    (r"q_lora_rank|o_lora_rank", 48),
    (r"kv_lora_rank", 32),
    (r"qk_rope_head_dim", _ROTARY_PART),
    (r"(.*_)?(head_dim|d_kv|kv_channels|dim_head|d_head|attention_head_size)", HEAD_DIM),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|multi_query_group_num|num_query_groups)", 2),
    (r"(.*_)?(num_(.*_)?attention_heads(_per_layer)?|n_heads?|num_heads|attention_heads)", HEADS),
    # Shorter than the texts of the probes, so that these reach beyond a window.
    (r"sliding_window(_size)?|window_size|attention_chunk_size|attention_window_size", 8),
    (r"local_attention|keep_window_size", 8),
    # Sparse attention chooses more tokens than the probes' documents have, so that no rounding
    # changes the choice, and fewer than a row of them, so that a choice across documents shows.
    (r"index_topk|indexer_budget", 16),
    (r"index_topk_blocks|index_block_size", 4),
    # Mixtures of experts.
    (r"(n_routed|num_local|num|moe_num)_experts?", 8),
    # LongCat's experts that give their input: the probes take them for a residual connection.
    (r"zero_expert_num", 0),
    (EXPERTS_OF_A_TOKEN, 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"rotary_dim", _ROTARY_PART),
    (r"index_kpool", 4),
    (_CONTEXT, 256),
)
_TOKEN_ID = re.compile(
    r".*token_(id|index)s?|.*token_ids|.*_(start|end|newline|patch)_id|pad_index"
)
# Sub-configurations whose modules do not run for text, and whose widths hang together otherwise.
_UNTOUCHED = ("vq_config", "audio_encoder_config")


def build_tiny_copy(config: PretrainedConfig, *, context: int | None = None) -> PreTrainedModel:
    """The tiny copy of the model that `config` describes: fp32, eval mode, random weights.

    Args:
        config: the model's.
        context: the length of the longest text, whatever its type calls it, and the original one of
            a rotary embedding; None: of several hundred tokens.

    Raises:
        UnsupportedStructureError: transformers has no class for it, or refuses the small sizes.
    """
    model_class, own_config = model_class_of(config)
    what = f"model_type {config.model_type!r}: no small model of its class could be built"
    with faults_of_library(what, UnsupportedStructureError), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small_config = shrunk(own_config, context=context)
        _check_size(model_class, small_config)
        tiny = model_class(small_config)
        _fill(tiny)
    return tiny.eval().requires_grad_(False)


def _check_size(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Checks, without memory, that the tiny copy is small.

    Raises:
        UnsupportedStructureError: a width that the rules above do not know is still large.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > _MOST_PARAMETERS:
        raise UnsupportedStructureError(
            f"{model_class.__name__}: the small model on which its structure would be found has "
            f"{size} parameters, at most {_MOST_PARAMETERS}"
        )


def _fill(tiny: nn.Module) -> None:
    """Draws every matrix, and what is zero: a gate that starts at 0 would hide its block."""
    for parameter in tiny.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(std=0.5 * parameter.shape[-1] ** -0.5)
        elif not parameter.data.any():
            parameter.data.normal_(std=0.05)


def shrunk(config: PretrainedConfig, *, context: int | None = None) -> PretrainedConfig:
    """`config` with small widths; the number and the types of its layers stay.

    `context` as in `build_tiny_copy`.
    """
    special_tokens: dict[int, int] = {}
    values = _cut(config.to_dict(), special_tokens)
    if context is not None:
        values = _with_context(values, context)
    return type(config).from_dict(values)


def _with_context(values: Mapping[str, Any], context: int) -> dict[str, Any]:
    """The entries with another length of the longest text, wherever they name one."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            changed[name] = _with_context(value, context)
        elif isinstance(value, int) and re.fullmatch(_CONTEXT, str(name)):
            changed[name] = context
        else:
            changed[name] = value
    return changed


def _cut(values: Mapping[str, Any], special_tokens: dict[int, int]) -> dict[str, Any]:
    """The entries of a configuration, or of one within it, for the tiny copy."""
    cut: dict[str, Any] = {}
    for name, value in values.items():
        if name in {"quantization_config", "dtype", "torch_dtype", "auto_map"}:
            continue
        if name == "per_layer_config" and isinstance(value, Mapping):
            cut[name] = {layer: _cut(of_layer, special_tokens) for layer, of_layer in value.items()}
        elif isinstance(value, Mapping) and name.endswith("_config") and name not in _UNTOUCHED:
            cut[name] = _cut(value, special_tokens)
        elif _TOKEN_ID.fullmatch(name):
            cut[name] = _token_ids(value, special_tokens)
        else:
            cut[name] = _smaller(name, value)
    _keep_relations(values, cut)
    return cut


def _smaller(name: str, value: Any) -> Any:  # JSON
    """The value of an entry in the tiny copy; a list of numbers is cut number by number."""
    if isinstance(value, list):
        return [_smaller(name, each) for each in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for pattern, largest in _LARGEST:
        if re.fullmatch(pattern, name):
            return min(value, largest)
    return value


def _token_ids(value: Any, special_tokens: dict[int, int]) -> Any:  # JSON
    """Other ids for special tokens, the same for the same: the copy's vocabulary is small."""
    if isinstance(value, list):
        return [_token_ids(each, special_tokens) for each in value]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return value
    place = special_tokens.setdefault(value, len(special_tokens))
    return FIRST_SPECIAL_TOKEN + place % (VOCAB_SIZE - FIRST_SPECIAL_TOKEN)


def _keep_relations(values: Mapping[str, Any], cut: dict[str, Any]) -> None:
    """Corrects entries that follow from others: equal numbers of heads stay equal, and so on."""
    heads = values.get("num_attention_heads")
    if heads is not None and values.get("num_key_value_heads") == heads:
        cut["num_key_value_heads"] = cut["num_attention_heads"]
    key_heads = values.get("linear_num_key_heads")
    if key_heads is not None and key_heads == values.get("linear_num_value_heads"):
        cut["linear_num_key_heads"] = cut["linear_num_value_heads"]
    width = cut.get("hidden_size")
    if "state_size" in values and "num_heads" in values:  # Mamba 2: its heads are a state space's
        cut["num_heads"] = cut["expand"] * width // cut["head_dim"]
    if "mamba_n_heads" in cut and "mamba_d_head" in cut:
        inner_width = cut.get("mamba_d_ssm") or cut["mamba_expand"] * width
        cut["mamba_d_head"] = inner_width // cut["mamba_n_heads"]
    if width and values.get("attention_hidden_size") == 2 * values["hidden_size"]:  # Zamba
        cut["attention_hidden_size"] = 2 * width
        cut["attention_head_dim"] = cut["attention_hidden_size"] // cut["num_attention_heads"]
    rows = values.get("vocab_size")
    for name, value in values.items():
        if rows is not None and "vocab" in name and value == rows:
            cut[name] = VOCAB_SIZE  # whatever the real one is: the probes' tokens need it
    rotary = values.get("qk_rope_head_dim")
    if rotary is not None:
        if values.get("head_dim") == rotary:
            cut["head_dim"] = cut["qk_rope_head_dim"]
        if "qk_head_dim" in cut:
            cut["qk_head_dim"] = cut["qk_nope_head_dim"] + cut["qk_rope_head_dim"]
    _cut_rotary(values, cut)


def _cut_rotary(values: Mapping[str, Any], cut: dict[str, Any]) -> None:
    """Shortens lists with one number for each pair of channels that is rotated."""
    head_dim = cut.get("head_dim")
    if not head_dim and cut.get("hidden_size") and cut.get("num_attention_heads"):
        head_dim = cut["hidden_size"] // cut["num_attention_heads"]
    if not head_dim:
        return
    part = values.get("partial_rotary_factor") or 1.0
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), Mapping):
            cut[name] = _cut_frequencies(values[name], head_dim, part)


def _cut_frequencies(rotary: Mapping[str, Any], head_dim: int, part: float) -> dict[str, Any]:
    """The parameters of a rotary embedding that rotates a `part` of each head, for small heads."""
    pairs = int(head_dim * rotary.get("partial_rotary_factor", part)) // 2
    cut: dict[str, Any] = {}
    for name, value in rotary.items():
        if isinstance(value, Mapping):  # parameters of one type of layer
            cut[name] = _cut_frequencies(value, head_dim, part)
        elif name in {"short_factor", "long_factor"}:
            cut[name] = value[:pairs]
        elif name == "mrope_section":
            sections = [section * pairs // sum(value) for section in value]
            sections[0] += pairs - sum(sections)
            cut[name] = sections
        else:
            cut[name] = value
    return cut
