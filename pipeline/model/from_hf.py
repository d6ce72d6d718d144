"""Reads a Hugging Face folder into our decoder: the architecture, and this rank's shard of the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from pipeline.errors import BaseModelError, in_one_line
from pipeline.model.base_folder import BaseFolder
from pipeline.model.layers import ACTIVATIONS
from pipeline.model.spec import DecoderSpec, RotarySpec, StoredResidual
from pipeline.parallel.quantized import fill_quantized, quantization_of, read_partition
from pipeline.parallel.sharding import fill, full_shape_of, partition_of
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.plan import Widths
from pipeline.untrusted_files import read_object

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
    file = path if path.is_file() else path / "config.json"
    config = _read_config(file)
    try:
        spec = _gpt_neox(config, file) if config.model_type == "gpt_neox" else _llama(config, file)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise BaseModelError(f"{file}: not a {config.model_type} config: {in_one_line(error):.300}") from None
    _check_sizes(spec, file)
    return spec


def _read_config(file: Path) -> PretrainedConfig:
    try:
        values = read_object(file, BaseModelError, "copy the folder again")
    except FileNotFoundError:
        raise BaseModelError(f"{file}: no such file; base must be a Hugging Face model folder") from None
    model_type, quantized = values.get("model_type"), values.get("quantization_config")
    if model_type == _WIDENED:
        raise BaseModelError(
            f"{file}: model_type 'scale': a widened model in its own format cannot be a base. To train its expansion "
            "further, convert its checkpoint with --format expansion and name that folder in `upscaled`; to widen a "
            "model again, train it with norm: base, variant preserve or adapt, and convert it with --format stock"
        )
    if model_type not in ARCHITECTURES:
        raise BaseModelError(f"{file}: model_type {model_type!r:.80} is not among {', '.join(ARCHITECTURES)}")
    if quantized:
        raise BaseModelError(
            f"{file}: quantization_config: quantized weights are not supported; use the original model"
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise BaseModelError(f"{file}: not a {model_type} config: {in_one_line(error):.300}") from None


def _llama(config: PretrainedConfig, file: Path) -> DecoderSpec:
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise BaseModelError(f"{file}: sliding_window {config.sliding_window!r:.80} is not supported; expected null")
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
        activation=_activation(config, file),
        max_position_embeddings=config.max_position_embeddings,
        gated_ffn=True,
        query_key_value_bias=config.model_type == "qwen2" or biased,
        output_bias=biased,
        ffn_bias=bool(getattr(config, "mlp_bias", False)),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        rotary=_rotary(config, file),
        residual=_residual(config, file),
    )


def _gpt_neox(config: PretrainedConfig, file: Path) -> DecoderSpec:
    heads = config.num_attention_heads
    return DecoderSpec(
        family="gpt_neox",
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        widths=Widths(config.hidden_size, config.intermediate_size, heads, heads),
        head_dim=config.hidden_size // heads,
        norm="layernorm",
        norm_eps=config.layer_norm_eps,
        activation=_activation(config, file),
        max_position_embeddings=config.max_position_embeddings,
        gated_ffn=False,
        query_key_value_bias=bool(config.attention_bias),
        output_bias=bool(config.attention_bias),
        ffn_bias=True,
        parallel_residual=bool(config.use_parallel_residual),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        rotary=_rotary(config, file),
    )


def _activation(config: PretrainedConfig, file: Path) -> str:
    if config.hidden_act not in ACTIVATIONS:
        raise BaseModelError(
            f"{file}: hidden_act {config.hidden_act!r:.80} is not among {', '.join(sorted(ACTIVATIONS))}"
        )
    return str(config.hidden_act)


def _rotary(config: PretrainedConfig, file: Path) -> RotarySpec:
    values: dict[str, Any] = config.rope_parameters
    scaling = values.get("rope_type", "default")
    if scaling not in ("default", "linear", "llama3"):
        raise BaseModelError(f"{file}: rope_type {scaling!r:.80} is not among default, linear, llama3")
    known = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RotarySpec(
        theta=values["rope_theta"],
        fraction=values.get("partial_rotary_factor", 1.0),
        scaling=scaling,
        **{name: values[name] for name in known if name in values},
    )


def _residual(config: PretrainedConfig, file: Path) -> StoredResidual | None:
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
        f"{file}: {RESIDUAL_KEY}: expected normed_size up to {config.hidden_size} and a scale that is a "
        f"power of two, found {values!r:.80}; convert the model again"
    )


# Above every model there is, and far below what Python, torch or a meta device cannot count.
_LARGEST = {"num_hidden_layers": 4096, "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16}
_LARGEST_OTHER = 2**31


def _check_sizes(spec: DecoderSpec, file: Path) -> None:
    """Raises BaseModelError where a size or a number is not one that a decoder can have."""
    sizes = {
        **asdict(spec.widths),
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": spec.num_layers,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "original_max_position_embeddings": spec.rotary.original_max_position_embeddings,
    }
    for name, size in sizes.items():
        largest = _LARGEST.get(name, _LARGEST_OTHER)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= largest:
            raise BaseModelError(f"{file}: {name}: expected a whole number from 1 to {largest}, found {size!r:.80}")
    rotary = asdict(spec.rotary)
    numbers = {name: rotary[name] for name in ("theta", "fraction", "factor", "low_freq_factor", "high_freq_factor")}
    for name, number in {"norm_eps": spec.norm_eps, **numbers}.items():
        if not isinstance(number, (int, float)) or not 0 < number < math.inf:
            raise BaseModelError(f"{file}: {name}: expected a number above 0, found {number!r:.80}")
    rotated = spec.head_dim * spec.rotary.fraction
    if spec.rotary.fraction > 1 or int(rotated) % 2 or rotated < 2:
        raise BaseModelError(
            f"{file}: partial_rotary_factor: {spec.rotary.fraction} of head_dim {spec.head_dim} is not an even number "
            "of channels"
        )
    if spec.widths.num_attention_heads % spec.widths.num_key_value_heads:
        raise BaseModelError(
            f"{file}: num_key_value_heads: {spec.widths.num_key_value_heads} does not divide num_attention_heads "
            f"{spec.widths.num_attention_heads}"
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
    check_weights(model, base, source)
    for name, parameter in model.named_parameters():
        if is_base(source(name)):
            is_quantized = quantization_of(parameter) is not None
            partition = read_partition(parameter) if is_quantized else partition_of(parameter)
            read = partial(base.read, source(name), partition, tp.rank, tp.size)
            (fill_quantized if is_quantized else fill)(parameter, tp, read)


def check_weights(model: nn.Module, base: BaseFolder, source: Callable[[str], str] = lambda name: name) -> None:
    """Checks the shape and type of every base parameter of `model` in the folder's files; reads their headers only.

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


def is_base(name: str) -> bool:
    """Whether a parameter is the pretrained model's."""
    return _BASE_NAME.search(name) is not None
