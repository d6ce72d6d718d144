"""Full fine-tuning of the attention maps alone, from a layer on."""

from __future__ import annotations

from pipeline.errors import ConfigError
from pipeline.methods.method import TrainingMethod
from pipeline.model.base_folder import BaseFolder
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.decoder import REFERENCE, Decoder
from pipeline.model.from_hf import load_base
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import TensorParallel
from scale_cpt_attention.settings import AttentionOnly

_MAPS = ("query", "key", "value", "output")


class AttentionOnlyMethod(TrainingMethod):
    """The attention maps of the layers from `first_layer` on train; everything else is frozen."""

    def __init__(self, settings: AttentionOnly, seed: int) -> None:
        # Nothing starts at random: the seed has no effect.
        self.settings = settings

    def _build(self, spec: DecoderSpec, tp: TensorParallel) -> Decoder:
        first_layer = self.settings.first_layer
        if not spec.is_native:
            raise ConfigError(
                f"method.name: attention needs a base of a native family, found model_type "
                f"{spec.family}; take scale or lora"
            )
        if first_layer >= spec.num_layers:
            raise ConfigError(
                f"method.first_layer: expected at most {spec.num_layers - 1}, the base's last "
                f"layer, found {first_layer}"
            )
        model = Decoder(spec, tp=tp)
        model.requires_grad_(False)
        for layer in model.layers[first_layer:]:
            for name in _MAPS:
                layer.attention.get_submodule(name).requires_grad_(True)
        return model

    def _load(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        # The frozen copy of the base, if the run compares with it, has the same weights.
        load_base(model, base, tp, source=lambda name: name.removeprefix(REFERENCE))
