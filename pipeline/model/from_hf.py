"""Reads a Hugging Face folder into our decoder: the architecture, and this rank's shard of the weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from pipeline.errors import BaseModelError
from pipeline.model.base_folder import BaseFolder
from pipeline.model.layers import ACTIVATIONS
from pipeline.model.spec import DecoderSpec, RotarySpec, StoredResidual
from pipeline.parallel.sharding import fill, full_shape_of, partition_of
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.plan import Widths

LLAMA_FAMILY = ("llama", "mistral", "qwen2")
_BASE_NAME = re.compile(r"^output\.base$|\.base\.(weight|bias)$")
ARCHITECTURES = (*LLAMA_FAMILY, "gpt_neox")
RESIDUAL_KEY = "widened_residual"
_WIDENED = "scale"


def open_base(path: Path) -> BaseFolder:
    """Opens a base model's folder.

    Raises:
        BaseModelError: the folder or its config is missing or damaged, or its architecture is not supported.
    """
    return BaseFolder(path, read_spec(path))


def read_spec(path: Path) -> DecoderSpec:
    """The architecture that the folder's config.json describes; `path` may be that file itself.

    Raises:
        BaseModelError: the file is missing or damaged, or the architecture is not supported.
    """
    config = _read_config(path)
    if config.model_type == "gpt_neox":
        return _gpt_neox(config, path)
    return _llama(config, path)


def _read_config(path: Path) -> PretrainedConfig:
    file = path if path.is_file() else path / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        model_type, quantized = values.get("model_type"), values.get("quantization_config")
    except FileNotFoundError:
        raise BaseModelError(f"{file}: no such file; base must be a Hugging Face model folder") from None
    except (ValueError, AttributeError) as error:
        raise BaseModelError(f"{file}: not a model's config ({error}); copy the folder again") from None
    if model_type == _WIDENED:
        raise BaseModelError(
            f"{file}: model_type 'scale': a widened model in its own format cannot be a base. To train its expansion "
            "further, convert its checkpoint with --format expansion and name that folder in `upscaled`; to widen a "
            "model again, train it with norm: base, variant preserve or adapt, and convert it with --format stock"
        )
    if model_type not in ARCHITECTURES:
        raise BaseModelError(f"{file}: model_type {model_type!r} is not among {', '.join(ARCHITECTURES)}")
    if quantized:
        raise BaseModelError(
            f"{file}: quantization_config: quantized weights are not supported; use the original model"
        )
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ArithmeticError, OSError) as error:
        raise BaseModelError(f"{file}: not a {model_type} config: {' '.join(str(error).split())}") from None


def _llama(config: PretrainedConfig, path: Path) -> DecoderSpec:
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise BaseModelError(
            f"{path}/config.json: sliding_window {config.sliding_window} is not supported; expected null"
        )
    heads = config.num_attention_heads
    biased = bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
        family="llama",
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        widths=Widths(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads or heads,
        ),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm="rmsnorm",
        norm_eps=config.rms_norm_eps,
        activation=_activation(config, path),
        max_position_embeddings=config.max_position_embeddings,
        gated_ffn=True,
        query_key_value_bias=config.model_type == "qwen2" or biased,
        output_bias=biased,
        ffn_bias=bool(getattr(config, "mlp_bias", False)),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        rotary=_rotary(config, path),
        residual=_residual(config, path),
    )


def _gpt_neox(config: PretrainedConfig, path: Path) -> DecoderSpec:
    heads = config.num_attention_heads
    return DecoderSpec(
        family="gpt_neox",
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        widths=Widths(config.hidden_size, config.intermediate_size, heads, heads),
        head_dim=config.hidden_size // heads,
        norm="layernorm",
        norm_eps=config.layer_norm_eps,
        activation=_activation(config, path),
        max_position_embeddings=config.max_position_embeddings,
        gated_ffn=False,
        query_key_value_bias=bool(config.attention_bias),
        output_bias=bool(config.attention_bias),
        ffn_bias=True,
        parallel_residual=bool(config.use_parallel_residual),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        rotary=_rotary(config, path),
    )


def _activation(config: PretrainedConfig, path: Path) -> str:
    if config.hidden_act not in ACTIVATIONS:
        raise BaseModelError(
            f"{path}/config.json: hidden_act {config.hidden_act!r} is not among {', '.join(sorted(ACTIVATIONS))}"
        )
    return str(config.hidden_act)


def _rotary(config: PretrainedConfig, path: Path) -> RotarySpec:
    values: dict[str, Any] = config.rope_parameters
    scaling = values.get("rope_type", "default")
    if scaling not in ("default", "linear", "llama3"):
        raise BaseModelError(f"{path}/config.json: rope_type {scaling!r} is not among default, linear, llama3")
    known = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RotarySpec(
        theta=values["rope_theta"],
        fraction=values.get("partial_rotary_factor", 1.0),
        scaling=scaling,
        **{name: values[name] for name in known if name in values},
    )


def _residual(config: PretrainedConfig, path: Path) -> StoredResidual | None:
    values = getattr(config, RESIDUAL_KEY, None)
    if values is None:
        return None
    try:
        residual = StoredResidual(**values)
        if 0 < residual.normed_size <= config.hidden_size and math.frexp(residual.scale)[0] == 0.5:
            return residual
    except TypeError:
        pass
    raise BaseModelError(
        f"{path}/config.json: {RESIDUAL_KEY}: expected normed_size up to {config.hidden_size} and a scale that is a "
        f"power of two, found {values}; convert the model again"
    )


def load_base(
    model: nn.Module,
    base: BaseFolder,
    tp: TensorParallel = SINGLE,
    source: Callable[[str], str] = lambda name: name,
) -> None:
    """Fills the base parameters of `model` with this rank's shards of the folder's weights, tensor by tensor.

    `source` maps the name of a model's parameter to that of the base's, where the two differ.

    Raises:
        BaseModelError: a weight is missing, or its shape is not the one that config.json implies.
    """
    for name, parameter in model.named_parameters():
        if not is_base(source(name)):
            continue
        found, expected = base.shape(source(name)), full_shape_of(parameter)
        if found != expected:
            raise BaseModelError(
                f"{base.path}: {source(name)} has shape {found}, config.json implies {expected}; copy the folder again"
            )
        read = partial(base.read, source(name), partition_of(parameter), tp.rank, tp.size)
        fill(parameter, tp, read)


def is_base(name: str) -> bool:
    """Whether a parameter is the pretrained model's."""
    return _BASE_NAME.search(name) is not None
