"""LLaMA Pro (Wu et al. 2024): depth expansion. The base is frozen; copies of some of its blocks train in between.

The layers are cut into `added_layers` groups, and a copy of each group's last block follows it. The copy's output and
down maps start at zero, so that it starts as the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pipeline.config import LlamaPro
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
        fits = [count for count in range(1, num_layers + 1) if num_layers % count == 0]
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


class LlamaProMethod(TrainingMethod):
    """The added blocks train, whole; everything else is frozen."""

    def __init__(self, settings: LlamaPro) -> None:
        self.settings = settings

    def build(
        self, spec: DecoderSpec, tp: TensorParallel, activation_checkpointing: ActivationCheckpointing
    ) -> Decoder:
        origins = layer_origins(spec.num_layers, self.settings.added_layers)
        deeper = replace(spec, num_layers=len(origins))
        model = Decoder(deeper, tp=tp, activation_checkpointing=activation_checkpointing).requires_grad_(False)
        for layer, origin in zip(model.layers, origins, strict=True):
            layer.requires_grad_(origin.added)
        return model

    @torch.no_grad()
    def load(self, model: Decoder, base: BaseFolder, tp: TensorParallel) -> None:
        origins = layer_origins(base.spec.num_layers, self.settings.added_layers)
        load_base(model, base, tp, source=lambda name: _base_name(name, origins))
        for layer, origin in zip(model.layers, origins, strict=True):
            for name, parameter in layer.named_parameters():
                if origin.added and name.startswith(_ZEROED):
                    held_values(parameter).zero_()


def _base_name(name: str, origins: list[LayerOrigin]) -> str:
    if not name.startswith("layers."):
        return name
    _, layer, rest = name.split(".", 2)
    return f"layers.{origins[int(layer)].base_layer}.{rest}"
