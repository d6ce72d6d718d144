"""Reads a Hugging Face folder's config.json as a hosted base, and has its structure found."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.utils import is_accelerate_available

from pipeline.errors import BaseModelError, faults_of_library
from pipeline.extensions.hosted.discovery.context import context_of, independent_context
from pipeline.extensions.hosted.discovery.document_kernels import kernels_unsupported_reason
from pipeline.extensions.hosted.discovery.find_structure import build_without_memory, find_structure
from pipeline.extensions.hosted.discovery.output_formula import find_output_formula
from pipeline.extensions.hosted.discovery.tiny_copy import build_tiny_copy
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.transformers_model import (
    DEQUANTIZED,
    first_entry,
    hf_config_of,
    model_class_of,
)
from pipeline.model.from_hf import read_config
from pipeline.model.spec import ACTIVATIONS, LayerKind, RotarySpec
from pipeline.scale.plan import Widths

# Entries of config.json that change no result.
_NOT_RECORDED = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "custom_pipelines",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_HEAD_DIM = 64
"""The size of an added head where the base has no heads, or heads of a size that suits none."""
_LARGEST_HEAD = 256
_NO_LIMIT = 2**31


def read_hosted_spec(path: Path) -> HostedSpec:
    """The hosted base that the folder's config.json describes; `path` may be that file itself.

    Raises:
        BaseModelError: the file is missing or damaged, transformers has no class for it, or its
            structure is not understood.
    """
    file, values = read_config(path)
    try:
        return hosted_spec_of(values)
    except BaseModelError as error:
        raise BaseModelError(f"{file}: {error}") from None


def hosted_spec_of(values: Mapping[str, Any]) -> HostedSpec:
    """The hosted base that the entries of a config.json describe.

    Raises:
        BaseModelError: transformers has no class for it, or its structure is not understood.
    """
    recorded = {name: value for name, value in values.items() if name not in _NOT_RECORDED}
    return _spec_of(orjson.dumps(recorded))


@cache
def _spec_of(config_json: bytes) -> HostedSpec:
    """The hosted base of a config.json; finding its structure takes seconds."""
    recorded = orjson.loads(config_json)
    model_type = recorded.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise BaseModelError(
            f"model_type {model_type!r:.80}: transformers has no such type of its own, and code of "
            "a model's folder is not run; use a base of another type"
        )
    _check_quantization(recorded.get("quantization_config"))
    with faults_of_library(f"not a {model_type} config", BaseModelError):
        config = hf_config_of(recorded)
    # Probes call modules of transformers in ways that their code may not expect.
    what = f"model_type {model_type}: its structure cannot be found; use a base of another type"
    with faults_of_library(what, BaseModelError):
        return _found_spec(config, recorded)


def _check_quantization(quantization: object) -> None:
    """Checks that transformers can dequantize the weights when it loads them.

    Raises:
        BaseModelError: it cannot.
    """
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in DEQUANTIZED:
        raise BaseModelError(
            f"quantization_config.quant_method: expected one of {', '.join(DEQUANTIZED)}, which "
            f"are dequantized when they are loaded, found {method!r:.40}; use the original model"
        )
    if method == "fp8" and not is_accelerate_available():
        raise BaseModelError(
            "quantization_config.quant_method: transformers loads fp8 with the package accelerate, "
            "which is not installed; run: pip install accelerate"
        )


def _found_spec(config: PretrainedConfig, recorded: Mapping[str, Any]) -> HostedSpec:
    """The hosted base of a configuration, whose structure and output are found on a tiny copy.

    Args:
        config: of the base.
        recorded: the entries of its config.json that count.
    """
    structure = find_structure(config)
    _, own_config = model_class_of(config)
    tiny = build_tiny_copy(config)
    output = find_output_formula(tiny, structure, own_config)
    output_map = build_without_memory(config).get_submodule(structure.output)
    text = copy.deepcopy(own_config.get_text_config(decoder=True))
    # Gemma 4's heads have other sizes in some layers. Here one is enough: it sizes the added heads.
    text.allow_global_per_layer_attribute_access = True
    heads = getattr(text, "num_attention_heads", None) or 1
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = _head_dim(text, structure.hidden_size, heads)
    layer = LayerKind(_rotary(text, head_dim))
    return HostedSpec(
        family=recorded["model_type"],
        vocab_size=output_map.get_parameter("weight").shape[0],
        layers=(layer,) * len(structure.layers),
        widths=Widths(structure.hidden_size, _intermediate_size(text), heads, kv_heads),
        head_dim=head_dim,
        norm="rmsnorm",
        norm_eps=first_entry(text, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-6,
        activation=_activation(text),
        max_position_embeddings=context_of(text) or _NO_LIMIT,
        tie_word_embeddings=bool(getattr(own_config, "tie_word_embeddings", False)),
        output_softcap=output.softcap,
        config=recorded,
        structure=structure,
        independent_context=independent_context(config, structure.documents),
        kernels_unsupported_reason=kernels_unsupported_reason(tiny, structure.documents),
        body=output.body,
        logit_scale=output.scale,
        output_map_bias=getattr(output_map, "bias", None) is not None,
    )


def _intermediate_size(config: PretrainedConfig) -> int:
    """The width of the base's FFNs: the largest, where each layer has one of its own (Gemma 3n)."""
    size = getattr(config, "intermediate_size", None) or 0
    return max(size) if isinstance(size, list) else size


def _head_dim(config: PretrainedConfig, hidden_size: int, heads: int) -> int:
    """The size of an added head: that of the base's heads, where it suits every kernel."""
    size = getattr(config, "head_dim", None) or hidden_size // heads
    if not isinstance(size, int) or size % 2 or not 2 <= size <= _LARGEST_HEAD:
        return _HEAD_DIM
    return size


def _activation(config: PretrainedConfig) -> str:
    name = first_entry(config, "hidden_act", "hidden_activation", "activation_function")
    return name if name in ACTIVATIONS else "silu"


def _rotary(config: PretrainedConfig, head_dim: int) -> RotarySpec:
    """The rotary embedding of the added heads: an ordinary one, on the base's scale if it has
    one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        # By type of layer; None for a type without rotary positions.
        parameters = parameters["full_attention"] or {}
    theta = parameters.get("rope_theta")
    if not isinstance(theta, (int, float)) or theta <= 1:
        theta = 10000.0
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return RotarySpec(tuple(frequencies.float().tolist()))
