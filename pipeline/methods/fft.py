"""Full fine-tuning: the base itself trains."""

from __future__ import annotations

from pipeline.methods.method import ActivationCheckpointing, TrainingMethod
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import TensorParallel


class FullFineTuningMethod(TrainingMethod):
    """Every parameter of the base trains, and nothing is added."""

    def build(
        self, spec: DecoderSpec, tp: TensorParallel, activation_checkpointing: ActivationCheckpointing
    ) -> Decoder:
        return Decoder(spec, tp=tp, activation_checkpointing=activation_checkpointing)

    def load(self, model: Decoder, base: BaseFolder, tp: TensorParallel) -> None:
        load_base(model, base, tp)
