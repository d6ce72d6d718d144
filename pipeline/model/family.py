"""What a family of architectures is: how its config is read, and how its tensors are named and fused.

What a config asks for and our decoder cannot do is a BaseModelError that names the entry; `from_hf` adds the file.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.errors import BaseModelError
from pipeline.model.spec import DecoderSpec, LayerKind, RotarySpec
from pipeline.scale.plan import Widths

Config = Any
"""A configuration of transformers; which attributes it has depends on its class."""


@dataclass(frozen=True)
class Family:
    """The architectures of a `model_type` of transformers.

    Attributes:
        names: the folder's name of each of our modules; "layers" is the prefix of a layer's, with its index as {}.
        layers: the kinds of layers that a config of this type describes.
        features: the fields of DecoderSpec in which they differ from a Llama.
        sparse_layers: of those with a mixture, the layers that have experts.
        fused: the parts of each tensor that holds several of our linear maps, in order. The rows of the parts follow
            each other, or with `fused_by_head` they alternate head by head.
        layer_lists: the config's entries that list layers.
        derives_head_dim: whether transformers or a server takes the size of a head to be hidden_size / heads.
        shared_experts: the config's entry with the width of an expert that every token takes, in widths of one expert.
        why_not_stock: why a widened model is not expressible as an ordinary one; None if it is.
    """

    model_type: str
    names: Mapping[str, str]
    layers: Callable[[Config], list[LayerKind]]
    features: Callable[[Config], dict[str, Any]] = lambda config: {}
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_by_head: bool = False
    sparse_layers: Callable[[Config], Collection[int]] = lambda config: range(config.num_hidden_layers)
    layer_lists: tuple[str, ...] = ()
    derives_head_dim: bool = False
    shared_experts: str | None = None
    why_not_stock: str | None = None

    def read(self, config: Config) -> DecoderSpec:
        """The architecture that a config of this type describes."""
        layers, features = self.layers(config), self.features(config)
        if "mixture" in features:
            sparse = self.sparse_layers(config)
            layers = [replace(layer, has_experts=index in sparse) for index, layer in enumerate(layers)]
        heads = config.num_attention_heads
        return DecoderSpec(
            **{
                "family": self.model_type,
                "vocab_size": config.vocab_size,
                "layers": tuple(layers),
                "widths": Widths(
                    hidden_size=config.hidden_size,
                    intermediate_size=config.intermediate_size,
                    num_attention_heads=heads,
                    num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
                ),
                "head_dim": head_dim_of(config),
                "norm": "rmsnorm",
                "norm_eps": getattr(config, "rms_norm_eps", None),
                "activation": getattr(config, "hidden_act", None),
                "max_position_embeddings": config.max_position_embeddings,
                "tie_word_embeddings": bool(config.tie_word_embeddings),
                **features,
            }
        )

    def layer_entries(self, spec: DecoderSpec) -> dict[str, Any]:
        """The config's entries that list layers, for a spec with more layers than the folder."""
        dense = [index for index, layer in enumerate(spec.layers) if not layer.has_experts]
        entries = {
            "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers],
            "no_rope_layers": [int(layer.rotary is not None) for layer in spec.layers],
            "mlp_layer_types": ["sparse" if layer.has_experts else "dense" for layer in spec.layers],
            "mlp_only_layers": dense,
            "decoder_sparse_step": 1,
            "first_k_dense_replace": len(dense),
        }
        return {name: entries[name] for name in self.layer_lists}

    def tensor(self, name: str, spec: DecoderSpec) -> HfTensor:
        """The tensor of a folder that holds the base parameter `name` (ours)."""
        if name == "output.base":
            return HfTensor(f"{self.names['output']}.weight")
        stem, kind = name.rsplit(".", 1)
        stem = stem.removesuffix(".base")
        if not stem.startswith("layers."):
            return HfTensor(f"{self.names[stem]}.{kind}")
        _, index, module = stem.split(".", 2)
        prefix = self.names["layers"].format(index)
        if module == ROUTER and kind == "bias":
            return HfTensor(f"{prefix}.{self.names[f'{ROUTER}.bias']}", in_three=True)
        theirs = self.names[module]
        if module.startswith(EXPERTS) and spec.mixture is not None:
            return HfTensor(f"{prefix}.{theirs}.{kind}", experts=spec.mixture.experts)
        parts = self.fused.get(theirs)
        return HfTensor(f"{prefix}.{theirs}.{kind}", None if parts is None else self._part(parts, module, spec))

    def _part(self, parts: Sequence[str], module: str, spec: DecoderSpec) -> FusedPart:
        groups = spec.widths.num_attention_heads if self.fused_by_head else 1
        widths, kv_rows = spec.widths, spec.widths.num_key_value_heads * spec.head_dim
        rows_of = {
            "attention.query": widths.num_attention_heads * spec.head_dim,
            "attention.key": kv_rows,
            "attention.value": kv_rows,
            "ffn.gate": widths.intermediate_size,
            "ffn.up": widths.intermediate_size,
        }
        rows = [rows_of[part] // groups for part in parts]
        index = parts.index(module)
        return FusedPart(index, groups, sum(rows), sum(rows[:index]), rows[index])


@dataclass(frozen=True)
class HfTensor:
    """A tensor in a Hugging Face folder; `part` says which of its rows, if it holds several linear maps.

    With `experts` it is as many tensors, one for each expert, whose number takes the place of {} in `name`. `in_three`:
    our parameter has three rows in 16 bits, of which it is the sum.
    """

    name: str
    part: FusedPart | None = None
    experts: int | None = None
    in_three: bool = False

    def names(self) -> list[str]:
        """The name of every expert's tensor, in order, or the one name."""
        return [self.name] if self.experts is None else [self.name.format(index) for index in range(self.experts)]


@dataclass(frozen=True)
class FusedPart:
    """The rows of one linear map in a fused tensor.

    The tensor has `groups` groups of `group_rows` rows, and in each the map has `rows` rows from the row `first` on.
    `index` is its place among the maps.
    """

    index: int
    groups: int
    group_rows: int
    first: int
    rows: int

    def read(self, view: Any, first: int, stop: int) -> Tensor:  # noqa: ANN401
        """The rows from `first` to `stop` of the map: [stop - first, ...]; few other rows of `view` are read."""
        if self.groups == 1:
            rows: Tensor = view[self.first + first : self.first + stop]
            return rows
        first_group, stop_group = first // self.rows, -(-stop // self.rows)
        held = view[first_group * self.group_rows : stop_group * self.group_rows]
        of_part = held.unflatten(0, (stop_group - first_group, self.group_rows))
        of_part = of_part[:, self.first : self.first + self.rows].flatten(0, 1)
        return of_part[first - first_group * self.rows : stop - first_group * self.rows].contiguous()


def fuse(parts: Iterable[Tensor], groups: int) -> Tensor:
    """The fused tensor of maps [rows, ...]; the inverse of `FusedPart.read`."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


ROUTER = "ffn.base.router"
EXPERTS = "ffn.base.experts."
"""How the names of the modules begin that hold a linear map of every expert of a layer."""


def head_dim_of(config: Config) -> int:
    """The size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_of(config: Config, layer_type: str | None = None, *, partial: bool = False) -> RotarySpec:
    """The rotary embedding that transformers makes of `config`, from its own module for the architecture.

    `layer_type` is given where layers of several types have several; `partial` where it can rotate a part of each head.
    """
    module = sys.modules[MODEL_MAPPING[type(config)].__module__]
    make = next(made for name, made in vars(module).items() if name.endswith("RotaryEmbedding"))
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn", "dynamic", "longrope"):
        raise BaseModelError(f"rope_type {kind!r:.80} is not among default, linear, llama3, yarn, dynamic, longrope")
    with torch.device("cpu"):
        rotary = make(config)
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies = getattr(rotary, f"{prefix}inv_freq")
    if 2 * len(frequencies) > head_dim_of(config) or (2 * len(frequencies) < head_dim_of(config) and not partial):
        raise BaseModelError(
            f"partial_rotary_factor {parameters.get('partial_rotary_factor')!r:.80}: {config.model_type} with "
            f"rope_type {kind} rotates whole heads, of {head_dim_of(config)} channels"
        )
    spec = RotarySpec(_numbers(frequencies), float(getattr(rotary, f"{prefix}attention_scaling")))
    if kind == "longrope":
        context = parameters["original_max_position_embeddings"]
        longer, _ = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=context + 1, layer_type=layer_type)
        return RotarySpec(spec.frequencies, spec.attention_factor, context, long_frequencies=_numbers(longer))
    if kind == "dynamic":
        context = config.max_position_embeddings
        theta, factor = float(parameters["rope_theta"]), float(parameters["factor"])
        return RotarySpec(spec.frequencies, spec.attention_factor, context, theta=theta, factor=factor)
    return spec


def _numbers(frequencies: Tensor) -> tuple[float, ...]:
    numbers = tuple(float(frequency) for frequency in frequencies)
    if not numbers or not all(0 <= number < math.inf for number in numbers):
        raise BaseModelError(
            "rope_parameters: expected frequencies of at least one pair of channels, finite and not negative"
        )
    return numbers


def check_size(name: str, size: object, largest: int = 2**31) -> None:
    """Raises BaseModelError unless `size`, the entry `name` of a config, is a whole number from 1 to `largest`."""
    if type(size) is not int or not 1 <= size <= largest:
        raise BaseModelError(f"{name}: expected a whole number from 1 to {largest}, found {size!r:.80}")


def check_number(name: str, number: object, *, may_be_zero: bool = False) -> None:
    """Raises BaseModelError unless `number` is finite and above 0."""
    if not isinstance(number, (int, float)) or not 0 <= number < math.inf or (number == 0 and not may_be_zero):
        raise BaseModelError(f"{name}: expected a number {'from' if may_be_zero else 'above'} 0, found {number!r:.80}")


def alike(config: Config, *, windowed: bool = False, partly_rotated: bool = False) -> list[LayerKind]:
    """Layers of one kind, which may have a window, or rotate a part of each head."""
    window = config.sliding_window if windowed else None
    if window is not None:
        check_size("sliding_window", window)
    return [LayerKind(rotary_of(config, partial=partly_rotated), window)] * config.num_hidden_layers


def typed_layers(config: Config, *, rotary_by_type: bool = False) -> list[LayerKind]:
    """The layers where `layer_types` says which of them have a window and, by type, a rotary embedding of their own."""
    types: list[str] = config.layer_types
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise BaseModelError(f"layer_types: {min(unknown)!r:.80} is not among full_attention, sliding_attention")
    if len(types) != config.num_hidden_layers:
        raise BaseModelError(
            f"layer_types: expected one for each of {config.num_hidden_layers} layers, found {len(types)}"
        )
    window = config.sliding_window
    if window is not None:
        check_size("sliding_window", window)
    elif "sliding_attention" in types:
        raise BaseModelError("sliding_window: layer_types names layers with a window, but its size is null")
    windows = {"sliding_attention": window, "full_attention": None}
    kinds = {kind: LayerKind(rotary_of(config, kind if rotary_by_type else None), windows[kind]) for kind in set(types)}
    return [kinds[kind] for kind in types]
