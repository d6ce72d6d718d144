"""LLaMA Pro (Wu et al. 2024): depth expansion. The base is frozen; copies of some of its blocks train in between.

The layers are cut into `added_layers` groups, and a copy of each group's last block follows it. The copy's output and
down maps start at zero, so that it starts as the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from pipeline.config.method import LlamaPro
from pipeline.errors import ConfigError
from pipeline.methods.method import ActivationCheckpointing, TrainingMethod
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameter import held_values
from pipeline.parallel.topology import TensorParallel

_ZEROED = ("attention.output.base.", "ffn.down.base.")


@dataclass(frozen=True)
class LayerOrigin:
    """From which of the base's layers one of the deeper model's comes, and whether it is an added copy."""

    base_layer: int
    added: bool


def layer_origins(num_layers: int, added_layers: int) -> list[LayerOrigin]:
    """The deeper model's layers, from the bottom up.

    Raises:
        ConfigError: the base's layers cannot be cut into so many equal groups; names the nearest numbers that fit.
    """
    if added_layers > num_layers or num_layers % added_layers:
        fits = fitting_added_layers(num_layers)
        nearest = sorted(sorted(fits, key=lambda count: abs(count - added_layers))[:2])
        raise ConfigError(
            f"method.added_layers: the base's {num_layers} layers cannot be cut into {added_layers} equal groups; "
            f"nearest that fit: {', '.join(map(str, nearest))}"
        )
    group = num_layers // added_layers
    origins = []
    for layer in range(num_layers):
        origins.append(LayerOrigin(layer, added=False))
        if (layer + 1) % group == 0:
            origins.append(LayerOrigin(layer, added=True))
    return origins


def fitting_added_layers(num_layers: int) -> list[int]:
    """How many blocks can be added to a base: as many as groups that its layers can be cut into."""
    return [count for count in range(1, num_layers + 1) if num_layers % count == 0]


class LlamaProMethod(TrainingMethod):
    """The added blocks train, whole; everything else is frozen."""

    def __init__(self, settings: LlamaPro) -> None:
        self.settings = settings

    def build(
        self, spec: DecoderSpec, tp: TensorParallel, activation_checkpointing: ActivationCheckpointing
    ) -> Decoder:
        origins = layer_origins(spec.num_layers, self.settings.added_layers)
        deeper = replace(spec, num_layers=len(origins))
        added = frozenset(index for index, origin in enumerate(origins) if origin.added)
        model = Decoder(deeper, added_layers=added, tp=tp, activation_checkpointing=activation_checkpointing)
        model.requires_grad_(False)
        for index in added:
            model.layers[index].requires_grad_(True)
        return model

    def base_name(self, name: str, spec: DecoderSpec) -> str:
        if not name.startswith("layers."):
            return name
        _, layer, rest = name.split(".", 2)
        origins = layer_origins(spec.num_layers, self.settings.added_layers)
        return f"layers.{origins[int(layer)].base_layer}.{rest}"

    @torch.no_grad()
    def load(self, model: Decoder, base: BaseFolder, tp: TensorParallel) -> None:
        load_base(model, base, tp, source=partial(self.base_name, spec=base.spec))
        for index in model.added_layers:
            for name, parameter in model.layers[index].named_parameters():
                if name.startswith(_ZEROED):
                    held_values(parameter).zero_()
