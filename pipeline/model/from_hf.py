"""Reads a Hugging Face folder into our decoder: the architecture, and this rank's shard of the
weights.

A config is read as transformers reads it: an entry that its class does not declare means nothing.
What it asks for and our decoder cannot do is a BaseModelError that names the entry.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.errors import BaseModelError, faults_of_library
from pipeline.expansion_folder import ExpansionFolder
from pipeline.files.json_files import parse_object
from pipeline.files.reading import read_bytes
from pipeline.hub import model_folder
from pipeline.model.base_folder import BaseFolder
from pipeline.model.families import FAMILIES, Config, hf_tensor
from pipeline.model.new_tokens import NEW_EMBEDDING, NewTokens, holds_new_tokens
from pipeline.model.spec import ACTIVATIONS, DecoderSpec, LayerKind, RotarySpec, StoredResidual
from pipeline.parallel.parameters import (
    fill,
    fill_whole,
    full_shape_of,
    partition_of,
    quantization_of,
)
from pipeline.parallel.quantized import fill_quantized, read_partition
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.plan import Widths

_BASE_NAME = re.compile(r"^output\.base$|\.base\.([a-z.]+\.)?(weight|bias)$")
_SPECIAL_FLOAT = "__float__"
"""The key under which transformers 5 writes the name of an infinite number."""
OWN_FORMATS = ("scale", "scale_hosted", "scale_combined", "scale_difference")
"""The `model_type` of folders that this package writes in a format of its own."""
RESIDUAL_KEY = "widened_residual"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
# Above every model there is, and far below what Python, torch or a meta device cannot count.
_LARGEST = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts"), 2**12
    ),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "head_dim", "moe_intermediate_size"), 2**16
    ),
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 2**31
    ),
}


def open_base(path: Path) -> BaseFolder:
    """Opens a base model's folder.

    Raises:
        BaseModelError: if the folder or its config is missing or damaged, or its architecture is
            not supported.
    """
    return BaseFolder(path, read_spec(path))


def config_file(path: Path) -> Path:
    """The config.json of a base's folder; `path` may be that file itself."""
    return path if path.is_file() else path / "config.json"


def read_config(path: Path) -> tuple[Path, dict[str, Any]]:
    """The config.json of a base's folder, and its entries.

    Raises:
        BaseModelError: the file is missing or damaged.
    """
    # A run's base that could not be had is still named as the user named it: this says why.
    file = config_file(model_folder(path, weights=False))
    advice = "copy the folder again"
    try:
        data = read_bytes(file, BaseModelError, advice)
        return file, parse_object(_in_plain_json(data), file, BaseModelError, advice)
    except FileNotFoundError:
        raise BaseModelError(
            f"{file}: no such file; base must be a Hugging Face model folder"
        ) from None


def _in_plain_json(data: bytes) -> bytes:
    """`data` with infinite numbers as transformers 5 writes them: `{"__float__": "Infinity"}`.

    Python's own writer, and so transformers 4, writes `Infinity`, which is not JSON (Mamba 2).
    """
    if b"Infinity" not in data and b"NaN" not in data:
        return data

    def tagged(name: str) -> dict[str, str]:
        return {_SPECIAL_FLOAT: name}

    try:
        return orjson.dumps(json.loads(data, parse_constant=tagged))
    except (ValueError, RecursionError):
        return data  # the strict reader says what is wrong


def with_special_floats(value: Any) -> Any:  # JSON
    """`value` of a config.json with infinite numbers as numbers, which JSON does not have."""
    if isinstance(value, list):
        return [with_special_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_SPECIAL_FLOAT}:
        return float(value[_SPECIAL_FLOAT])
    return {name: with_special_floats(each) for name, each in value.items()}


def read_spec(path: Path) -> DecoderSpec:
    """The architecture that the folder's config.json describes; `path` may be that file itself.

    Raises:
        BaseModelError: if the file is missing or damaged, or the architecture is not supported.
    """
    file, values = read_config(path)
    try:
        _check_type(values)
        with faults_of_library(f"not a {values['model_type']} config", BaseModelError):
            return _spec_of(hf_config(values))
    except BaseModelError as error:
        raise BaseModelError(f"{file}: {error}") from None


def _check_type(values: Mapping[str, Any]) -> None:
    model_type = values.get("model_type")
    if model_type == "scale_difference":
        raise BaseModelError(
            f"model_type {model_type!r}: a base with a packed difference cannot be a base; to "
            "train the model further, convert its checkpoint with --format merged --without-gate "
            "and name that folder"
        )
    if model_type in OWN_FORMATS:
        raise BaseModelError(
            f"model_type {model_type!r}: a widened model in its own format cannot be a base; to "
            "train it further, convert its checkpoint with --format expansion and name that folder "
            "in `init_expansion`; to widen it again, train it with norm: base, variant preserve or "
            "adapt, and convert it with --format merged"
        )
    if model_type not in tuple(FAMILIES):  # it may be of a type that has no hash
        raise BaseModelError(f"model_type {model_type!r:.80} is not among {', '.join(FAMILIES)}")
    if values.get("quantization_config"):
        raise BaseModelError(
            "quantization_config: a native base has no quantized weights; use the original model, "
            "or base_code: transformers, which dequantizes FP8 and MXFP4"
        )


def _spec_of(config: Config) -> DecoderSpec:
    """The architecture of a config of a supported type.

    Raises:
        BaseModelError: a number or a feature is not supported.
        Exception: also what transformers and torch raise.
    """
    for name, largest in _LARGEST.items():
        size = _declared(config, name)
        if size is not None and not 1 <= size <= largest:
            raise BaseModelError(
                f"{name}: expected a whole number from 1 to {largest}, found {size}"
            )
    family = FAMILIES[config.model_type]
    for name in family.unsupported:
        if getattr(config, name, None):
            raise BaseModelError(
                f"{name}: expected null or false, found {getattr(config, name)!r:.80}"
            )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise BaseModelError(
            f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}"
        )
    features = family.features(config)
    dense = family.dense(config) if "mixture" in features else range(config.num_hidden_layers)
    residual = getattr(config, RESIDUAL_KEY, None)
    if residual is not None:
        residual = TypeAdapter(StoredResidual).validate_python(residual)
    # What all families have in common; `features` replaces some of it.
    values: dict[str, Any] = {
        "family": config.model_type,
        "vocab_size": config.vocab_size,
        "layers": tuple(_layers(config, family.unrotated(config), dense)),
        "widths": Widths(config.hidden_size, config.intermediate_size, heads, kv_heads),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "norm": "rmsnorm",
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "residual": residual,
    }
    spec = DecoderSpec(**values | features)
    if spec.activation not in ACTIVATIONS:
        raise BaseModelError(
            f"hidden_act {spec.activation!r:.80} is not among {', '.join(sorted(ACTIVATIONS))}"
        )
    _check_numbers(spec)
    if spec.residual is not None:
        mantissa, _ = math.frexp(spec.residual.scale)
        # Only a power of two changes exponents alone, so that reading undoes it exactly.
        is_power_of_two = mantissa == 0.5
        if not is_power_of_two or not 0 < spec.residual.normed_size <= config.hidden_size:
            raise BaseModelError(
                f"{RESIDUAL_KEY}: expected a scale that is a power of two, and a part of the "
                "channels"
            )
    return spec


def _check_numbers(spec: DecoderSpec) -> None:
    """Checks that the numbers that multiply or divide are finite and positive.

    Raises:
        BaseModelError: one is not.
    """
    numbers: list[tuple[str, float | None]] = [
        ("norm_eps", spec.norm_eps),
        ("embedding_scale", spec.embedding_scale),
        ("attention_scale", spec.attention_scale),
        ("attention_softcap", spec.attention_softcap),
        ("output_softcap", spec.output_softcap),
    ]
    for rotary in {layer.rotary for layer in spec.layers}:
        if rotary is not None:
            numbers += [("frequency", frequency) for frequency in rotary.frequencies]
            numbers.append(("attention_factor", rotary.attention_factor))
    for name, number in numbers:
        if number is None:
            continue
        if not isinstance(number, (int, float)) or not 0 < number < math.inf:
            raise BaseModelError(f"{name}: expected a number above 0, found {number!r:.80}")


def _layers(
    config: Config, unrotated: Collection[int], dense: Collection[int]
) -> Iterator[LayerKind]:
    """The kind of each layer; `unrotated` and `dense` are as in `Family`."""
    window = _declared(config, "sliding_window")
    if not _declared(config, "use_sliding_window", True):
        window = None
    alike = "sliding_attention" if window else "full_attention"
    types = _declared(config, "layer_types", [alike] * config.num_hidden_layers)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise BaseModelError(
            f"layer_types: {min(unknown)!r:.80} is not among full_attention, sliding_attention"
        )
    if "sliding_attention" in types and not (isinstance(window, int) and window > 0):
        raise BaseModelError(
            f"sliding_window: expected a number of tokens for sliding layers, found {window!r:.80}"
        )
    rotary: dict[str, RotarySpec] = {}
    for kind in set(types):
        # Gemma 3 has parameters for each type of layer, other families one set for all.
        layer_type = kind if kind in config.rope_parameters else None
        rotary[kind] = _rotary(config, layer_type)
    for layer, kind in enumerate(types):
        yield LayerKind(
            rotary=None if layer in unrotated else rotary[kind],
            window=window if kind == "sliding_attention" else None,
            has_experts=layer not in dense,
        )


def _declared(config: Config, name: str, default: Any = None) -> Any:
    """An entry of `config`, or `default` where its class does not declare it: then it means
    nothing."""
    # A config.json may have any entries, and transformers keeps unknown ones as attributes of the
    # object, where they change nothing.
    if not hasattr(type(config), name):
        return default
    return getattr(config, name)


def _rotary(config: Config, layer_type: str | None) -> RotarySpec:
    """The rotary embedding that transformers makes of `config`, from its own module for the
    architecture.

    `layer_type` is given where layers of several types have several.

    Raises:
        BaseModelError: the kind of rotary embedding is not supported.
    """
    parameters = (
        config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    )
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise BaseModelError(f"rope_type {kind!r:.80} is not among {', '.join(_ROPE_TYPES)}")
    module = sys.modules[MODEL_MAPPING[type(config)].__module__]
    # transformers' own numbers, not ours after its documentation: a new rope_type, or a changed
    # formula, cannot differ silently.
    make = next(made for name, made in vars(module).items() if name.endswith("RotaryEmbedding"))
    with torch.device("cpu"):
        rotary = make(config)
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies = tuple(getattr(rotary, f"{prefix}inv_freq").tolist())
    factor = float(getattr(rotary, f"{prefix}attention_scaling"))
    if kind != "longrope":
        return RotarySpec(frequencies, factor)
    context = parameters["original_max_position_embeddings"]
    # transformers chooses between the two sets of frequencies by the length of the text: asking for
    # one token more than the context gives the other set.
    longer, _ = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=context + 1, layer_type=layer_type)
    return RotarySpec(frequencies, factor, context, tuple(longer.tolist()))


def model_type_of(values: Mapping[str, Any]) -> Any:  # whatever config.json holds
    """The `model_type` as AutoConfig understands it: a mistral with `layer_types` is a
    ministral."""
    model_type = values.get("model_type")
    if model_type == "mistral" and "layer_types" in values:
        return "ministral"
    return model_type


def loading_options(values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """How `from_pretrained` is to load a folder with this config.json and some entries changed: as
    any user would.

    For some types transformers refuses heads that do not divide hidden_size although head_dim says
    their size, and then runs them: Kanana, a Llama, has 24 heads of 128 channels and a hidden_size
    of 1792. Those get a `config`.
    """
    if _has_heads_of_their_own_size(values):
        return {"config": hf_config({**values, **changes})}
    return changes


def _has_heads_of_their_own_size(values: Mapping[str, Any]) -> bool:
    sizes: list[int] = []
    for key in ("hidden_size", "num_attention_heads", "head_dim"):
        size = values.get(key)
        if type(size) is not int or size <= 0:
            return False
        sizes.append(size)
    hidden_size, heads, _ = sizes
    return hidden_size % heads != 0


def hf_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' configuration of a supported `model_type`, from the contents of config.json,
    with any heads.

    Raises:
        Exception: what transformers raises.
    """
    made = {**values, "model_type": model_type_of(values)}
    has_own_size = _has_heads_of_their_own_size(values)
    if has_own_size:
        made["hidden_size"] = values["num_attention_heads"] * values["head_dim"]
    config: PretrainedConfig = CONFIG_MAPPING[made["model_type"]].from_dict(made)
    if has_own_size:
        # Its constructor checks that heads divide hidden_size; set afterwards, nothing is checked
        # again.
        config.hidden_size = values["hidden_size"]
    return config


def load_base(
    model: nn.Module,
    base: BaseFolder,
    tp: TensorParallel = SINGLE,
    source: Callable[[str], str] = lambda name: name,
) -> None:
    """Fills the base parameters of `model` with this rank's shards of the folder's weights, tensor
    by tensor.

    `source` maps the name of a model's parameter to that of the base's, where the two differ.

    Raises:
        BaseModelError: as `check_weights`.
    """
    check_weights(model, base, source)
    for name, parameter in model.named_parameters():
        if not is_base(source(name)):
            continue
        if quantization_of(parameter) is None:
            partition = partition_of(parameter)
            fill(parameter, tp, partial(base.read, source(name), partition, tp.rank, tp.size))
        else:
            partition = read_partition(parameter)
            read = partial(base.read, source(name), partition, tp.rank, tp.size)
            fill_quantized(parameter, tp, read)


@torch.no_grad()
def load_new_tokens(
    model: nn.Module, base: BaseFolder, tp: TensorParallel, expansion: ExpansionFolder | None
) -> None:
    """Sets the rows of new tokens of `model`: to those of `expansion` where another run trained
    them, or initially."""
    if base.new_tokens is None:
        return
    for name, parameter in model.named_parameters():
        if not holds_new_tokens(name):
            continue
        shape = full_shape_of(parameter)
        if expansion is not None and name in expansion.names:
            rows = expansion.read(name, shape)
        else:
            rows = _initial_new_rows(name, shape[1], base, base.new_tokens, expansion)
        fill_whole(parameter, tp, rows)


def _initial_new_rows(
    name: str,
    columns: int,
    base: BaseFolder,
    new_tokens: NewTokens,
    expansion: ExpansionFolder | None,
) -> Tensor:
    """The initial value of the parameter `name` of new tokens, [n, D + U]: computed for each stream
    by itself."""
    in_embedding = name.endswith(NEW_EMBEDDING)
    of_base = base.read("embedding.base.weight" if in_embedding else "output.base")
    rows = new_tokens.initial_rows(of_base)
    added = columns - rows.shape[1]
    if added == 0:
        return rows
    if not in_embedding:
        # W_out^up starts at zero, so that the model starts as its base.
        return torch.cat([rows, torch.zeros(len(rows), added)], dim=1)
    assert expansion is not None, "an expansion stream without an expansion"
    of_expansion = expansion.read("embedding.expansion.weight", (base.spec.vocab_size, added))
    return torch.cat([rows, new_tokens.initial_rows(of_expansion)], dim=1)


def check_weights(
    model: nn.Module, base: BaseFolder, source: Callable[[str], str] = lambda name: name
) -> None:
    """Checks the shape and type of every base parameter of `model` in the folder's files; reads
    their headers only.

    Raises:
        BaseModelError: if a weight is missing, or its shape is not the one that config.json
            implies, or the output projection is to be the embedding and is not.
    """
    base.check_tie()
    for name, parameter in model.named_parameters():
        if not is_base(source(name)):
            continue
        # From headers alone: a fault is found before any weight is read.
        found = base.shape(source(name))
        expected = full_shape_of(parameter)
        if found != expected:
            raise BaseModelError(
                f"{base.path}: {source(name)} has shape {found}, config.json implies {expected} "
                f"(the tensor {hf_tensor(source(name), base.spec).name.format('*')}); copy the "
                "folder again"
            )


def is_base(name: str) -> bool:
    """Whether a parameter is the pretrained model's."""
    # A base of transformers is a module of that name, with transformers' own names below it.
    return name.startswith("base.") or _BASE_NAME.search(name) is not None
