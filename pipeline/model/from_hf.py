"""Reads a Hugging Face folder into our decoder: the architecture, and this rank's shard of the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from pipeline.errors import BaseModelError, in_one_line
from pipeline.files import read_object
from pipeline.hub import model_folder
from pipeline.model.base_folder import BaseFolder
from pipeline.model.families import FAMILIES, hf_tensor
from pipeline.model.family import UnsupportedError, head_dim_of
from pipeline.model.layers import ACTIVATIONS
from pipeline.model.spec import DecoderSpec, StoredResidual
from pipeline.parallel.quantized import fill_quantized, quantization_of, read_partition
from pipeline.parallel.sharding import fill, full_shape_of, partition_of
from pipeline.parallel.topology import SINGLE, TensorParallel

_FAULTS = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError)
"""What wrong values of a config raise in transformers and torch."""
_BASE_NAME = re.compile(r"^output\.base$|\.base\.([a-z.]+\.)?(weight|bias)$")
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
    _check_sizes(config, file)
    try:
        spec = FAMILIES[config.model_type].read(config)
    except UnsupportedError as error:
        raise BaseModelError(f"{file}: {error}") from None
    except _FAULTS as error:
        raise BaseModelError(f"{file}: not a {config.model_type} config: {in_one_line(error):.300}") from None
    _check_spec(spec, file)
    return replace(spec, residual=_residual(getattr(config, RESIDUAL_KEY, None), spec.widths.hidden_size, file))


def _read_config(file: Path) -> PretrainedConfig:
    try:
        values = read_object(file, BaseModelError, "copy the folder again")
    except FileNotFoundError:
        model_folder(file.parent, weights=False)  # says why a model on the hub could not be had
        raise BaseModelError(f"{file}: no such file; base must be a Hugging Face model folder") from None
    model_type, quantized = values.get("model_type"), values.get("quantization_config")
    if model_type == _WIDENED:
        raise BaseModelError(
            f"{file}: model_type 'scale': a widened model in its own format cannot be a base. To train its expansion "
            "further, convert its checkpoint with --format expansion and name that folder in `upscaled`; to add "
            "another, train it on the same base, and put both beside each other (scale-cpt combine); to widen it, "
            "train it with norm: base, variant preserve or adapt, and convert it with --format stock"
        )
    if model_type not in tuple(FAMILIES):  # it may be of a type that has no hash
        raise BaseModelError(f"{file}: model_type {model_type!r:.80} is not among {', '.join(FAMILIES)}")
    if quantized:
        raise BaseModelError(
            f"{file}: quantization_config: quantized weights are not supported; use the original model"
        )
    try:
        return hf_config(values)
    except (StrictDataclassError, *_FAULTS) as error:
        raise BaseModelError(f"{file}: not a {model_type} config: {in_one_line(error):.300}") from None


def model_type_of(values: Mapping[str, Any]) -> Any:  # noqa: ANN401  # whatever config.json holds
    """The `model_type` as AutoConfig understands it: a mistral with `layer_types` is a ministral."""
    model_type = values.get("model_type")
    return "ministral" if model_type == "mistral" and "layer_types" in values else model_type


def loading_options(values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """How `from_pretrained` is to load a folder with this config.json and some entries changed: as any user would.

    For some types transformers refuses heads that do not divide hidden_size although head_dim says their size, and then
    runs them: Kanana, a Llama, has 24 heads of 128 channels and a hidden_size of 1792. Those get a `config`.
    """
    return {"config": hf_config({**values, **changes})} if _has_heads_of_their_own_size(values) else changes


def _has_heads_of_their_own_size(values: Mapping[str, Any]) -> bool:
    sizes = [values.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim")]
    return all(type(size) is int and size > 0 for size in sizes) and sizes[0] % sizes[1] != 0  # type: ignore[operator]


def hf_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' configuration of a supported `model_type`, from the contents of config.json, with any heads.

    Raises what transformers raises.
    """
    made = {**values, "model_type": model_type_of(values)}
    if _has_heads_of_their_own_size(values):
        made["hidden_size"] = values["num_attention_heads"] * values["head_dim"]
    config: PretrainedConfig = CONFIG_MAPPING[made["model_type"]].from_dict(made)
    if _has_heads_of_their_own_size(values):
        config.hidden_size = values["hidden_size"]
    return config


def _residual(values: object, hidden_size: int, file: Path) -> StoredResidual | None:
    if values is None:
        return None
    try:
        residual = StoredResidual(**values)  # type: ignore[arg-type]  # whatever config.json holds
        has_types = (type(residual.normed_size), type(residual.read_unnormed)) == (int, bool)
        if has_types and 0 < residual.normed_size <= hidden_size and math.frexp(residual.scale)[0] == 0.5:
            return residual
    except TypeError:
        pass
    raise BaseModelError(
        f"{file}: {RESIDUAL_KEY}: expected normed_size up to {hidden_size} and a scale that is a "
        f"power of two, found {values!r:.80}; convert the model again"
    )


# Above every model there is, and far below what Python, torch or a meta device cannot count.
_LARGEST = {"num_hidden_layers": 4096, "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16}
_LARGEST_OTHER = 2**31
_SIZES = (*_LARGEST, "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")


def _check_sizes(config: PretrainedConfig, file: Path) -> None:
    """Raises BaseModelError where a size is not one that a decoder can have."""
    for name in _SIZES:
        size, largest = getattr(config, name, None), _LARGEST.get(name, _LARGEST_OTHER)
        if size is None and (name in ("head_dim", "num_key_value_heads") or not hasattr(config, name)):
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= largest:
            raise BaseModelError(f"{file}: {name}: expected a whole number from 1 to {largest}, found {size!r:.80}")
    if head_dim_of(config) > _LARGEST["head_dim"]:
        raise BaseModelError(
            f"{file}: hidden_size: {config.hidden_size} makes heads of {head_dim_of(config)} channels, expected "
            f"at most {_LARGEST['head_dim']}"
        )


def _check_spec(spec: DecoderSpec, file: Path) -> None:
    """Raises BaseModelError where the numbers of a config do not make a decoder."""
    if spec.activation not in ACTIVATIONS:
        raise BaseModelError(
            f"{file}: hidden_act {spec.activation!r:.80} is not among {', '.join(sorted(ACTIVATIONS))}"
        )
    numbers = {"norm_eps": spec.norm_eps, "embedding_scale": spec.embedding_scale}
    optional = ("attention_scale", "attention_softcap", "output_softcap")
    numbers |= {name: getattr(spec, name) for name in optional if getattr(spec, name) is not None}
    for rotary in {layer.rotary for layer in spec.layers if layer.rotary is not None}:
        numbers["attention_factor"] = rotary.attention_factor
        if rotary.theta is not None and rotary.factor is not None:
            numbers |= {"rope_theta": rotary.theta, "factor": rotary.factor}
    for name, number in numbers.items():
        if not isinstance(number, (int, float)) or not 0 < number < math.inf:
            raise BaseModelError(f"{file}: {name}: expected a number above 0, found {number!r:.80}")
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
        BaseModelError: a weight is missing, or its shape is not the one that config.json implies, or the output
            projection is to be the embedding and is not.
    """
    base.check_tie()
    for name, parameter in model.named_parameters():
        if not is_base(source(name)):
            continue
        found, expected = base.shape(source(name)), full_shape_of(parameter)
        if found != expected:
            raise BaseModelError(
                f"{base.path}: {source(name)} has shape {found}, config.json implies {expected} (the tensor "
                f"{hf_tensor(source(name), base.spec).name.format('*')}); copy the folder again"
            )


def is_base(name: str) -> bool:
    """Whether a parameter is the pretrained model's."""
    return _BASE_NAME.search(name) is not None
