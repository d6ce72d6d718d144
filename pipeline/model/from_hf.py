"""Reads a Hugging Face folder into our decoder: the architecture, and this rank's shard of the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from pipeline.errors import BaseModelError, faults_of_library
from pipeline.files import read_object
from pipeline.hub import model_folder
from pipeline.model.base_folder import BaseFolder
from pipeline.model.families import FAMILIES, hf_tensor
from pipeline.model.family import check_number, check_size, head_dim_of
from pipeline.model.spec import ACTIVATIONS, DecoderSpec, StoredResidual
from pipeline.parallel.quantized import fill_quantized, quantization_of, read_partition
from pipeline.parallel.sharding import fill, full_shape_of, partition_of
from pipeline.parallel.topology import SINGLE, TensorParallel

_BASE_NAME = re.compile(r"^output\.base$|\.base\.([a-z.]+\.)?(weight|bias)$")
RESIDUAL_KEY = "widened_residual"
# Above every model there is, and far below what Python, torch or a meta device cannot count.
_LARGEST = {
    **{"num_hidden_layers": 4096, "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16},
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 2**31),
}


def open_base(path: Path) -> BaseFolder:
    """Opens a base model's folder.

    Raises BaseModelError if the folder or its config is missing or damaged, or its architecture is not supported.
    """
    return BaseFolder(path, read_spec(path))


def read_spec(path: Path) -> DecoderSpec:
    """The architecture that the folder's config.json describes; `path` may be that file itself.

    Raises BaseModelError if the file is missing or damaged, or the architecture is not supported.
    """
    file = path if path.is_file() else path / "config.json"
    try:
        values = read_object(file, BaseModelError, "copy the folder again")
    except FileNotFoundError:
        model_folder(file.parent, weights=False)  # says why a model on the hub could not be had
        raise BaseModelError(f"{file}: no such file; base must be a Hugging Face model folder") from None
    try:
        _check_type(values)
        with faults_of_library(f"not a {values['model_type']} config", BaseModelError):
            return _spec_of(values)
    except BaseModelError as error:
        raise BaseModelError(f"{file}: {error}") from None


def _check_type(values: Mapping[str, Any]) -> None:
    model_type = values.get("model_type")
    if model_type == "scale":
        raise BaseModelError(
            "model_type 'scale': a widened model in its own format cannot be a base. To train its expansion "
            "further, convert its checkpoint with --format expansion and name that folder in `upscaled`; to add "
            "another, train it on the same base, and put both beside each other (scale-cpt combine); to widen it, "
            "train it with norm: base, variant preserve or adapt, and convert it with --format stock"
        )
    if model_type not in tuple(FAMILIES):  # it may be of a type that has no hash
        raise BaseModelError(f"model_type {model_type!r:.80} is not among {', '.join(FAMILIES)}")
    if values.get("quantization_config"):
        raise BaseModelError("quantization_config: quantized weights are not supported; use the original model")


def _spec_of(values: Mapping[str, Any]) -> DecoderSpec:
    """The architecture of a config of a supported type; raises also what transformers and torch raise."""
    config = hf_config(values)
    for name, largest in _LARGEST.items():
        size = getattr(config, name, None)
        if size is not None or (hasattr(config, name) and name not in ("head_dim", "num_key_value_heads")):
            check_size(name, size, largest)
    if head_dim_of(config) > _LARGEST["head_dim"]:
        raise BaseModelError(
            f"hidden_size: {config.hidden_size} makes heads of {head_dim_of(config)} channels, expected "
            f"at most {_LARGEST['head_dim']}"
        )
    spec = FAMILIES[config.model_type].read(config)
    if spec.activation not in ACTIVATIONS:
        raise BaseModelError(f"hidden_act {spec.activation!r:.80} is not among {', '.join(sorted(ACTIVATIONS))}")
    if spec.widths.num_attention_heads % spec.widths.num_key_value_heads:
        raise BaseModelError(
            f"num_key_value_heads: {spec.widths.num_key_value_heads} does not divide num_attention_heads "
            f"{spec.widths.num_attention_heads}"
        )
    numbers = [(name, getattr(spec, name)) for name in ("attention_scale", "attention_softcap", "output_softcap")]
    for rotary in {layer.rotary for layer in spec.layers if layer.rotary is not None}:
        numbers += [(name, getattr(rotary, name)) for name in ("attention_factor", "theta", "factor")]
    for name, number in numbers:
        if number is not None:
            check_number(name, number)
    check_number("norm_eps", spec.norm_eps)
    check_number("embedding_scale", spec.embedding_scale)
    return replace(spec, residual=_residual(getattr(config, RESIDUAL_KEY, None), spec.widths.hidden_size))


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
    if own_size := _has_heads_of_their_own_size(values):
        made["hidden_size"] = values["num_attention_heads"] * values["head_dim"]
    config: PretrainedConfig = CONFIG_MAPPING[made["model_type"]].from_dict(made)
    if own_size:
        config.hidden_size = values["hidden_size"]
    return config


def _residual(values: Any, hidden_size: int) -> StoredResidual | None:  # noqa: ANN401  # whatever config.json holds
    if values is None:
        return None
    with faults_of_library(RESIDUAL_KEY, BaseModelError):
        residual = StoredResidual(**values)
        check_size(f"{RESIDUAL_KEY}.normed_size", residual.normed_size, hidden_size)
        if type(residual.read_unnormed) is bool and math.frexp(residual.scale)[0] == 0.5:
            return residual
    raise BaseModelError(
        f"{RESIDUAL_KEY}: expected a scale that is a power of two, found {values!r:.80}; convert the model again"
    )


def load_base(
    model: nn.Module,
    base: BaseFolder,
    tp: TensorParallel = SINGLE,
    source: Callable[[str], str] = lambda name: name,
) -> None:
    """Fills the base parameters of `model` with this rank's shards of the folder's weights, tensor by tensor.

    `source` maps the name of a model's parameter to that of the base's, where the two differ. Raises BaseModelError if
    a weight is missing, or its shape is not the one that config.json implies.
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

    Raises BaseModelError if a weight is missing, or its shape is not the one that config.json implies, or the output
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
