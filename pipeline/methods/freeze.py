"""Freeze: full fine-tuning with the embedding and the bottom layers held."""

from __future__ import annotations

from pipeline.config.method import Freeze
from pipeline.errors import ConfigError
from pipeline.methods.fft import FullFineTuningMethod
from pipeline.methods.method import ActivationCheckpointing
from pipeline.model.decoder import Decoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import TensorParallel


class FreezeMethod(FullFineTuningMethod):
    """The embedding (with a tied output projection) and the lowest `frozen_layers` layers do not train."""

    def __init__(self, settings: Freeze) -> None:
        self.settings = settings

    def build(
        self, spec: DecoderSpec, tp: TensorParallel, activation_checkpointing: ActivationCheckpointing
    ) -> Decoder:
        count = self.settings.frozen_layers
        if count > spec.num_layers:
            raise ConfigError(f"method.frozen_layers: {count}, but the base has {spec.num_layers} layers")
        model = super().build(spec, tp, activation_checkpointing)
        model.embedding.requires_grad_(False)
        model.layers[:count].requires_grad_(False)
        return model
