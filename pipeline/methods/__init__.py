"""What a run trains: SCALE, or what it is compared with. One small interface, one file each."""

from __future__ import annotations

from pipeline.config import FullFineTuning, RunConfig
from pipeline.methods.fft import FullFineTuningMethod
from pipeline.methods.method import TrainingMethod
from pipeline.methods.scale import Scale
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.parallel.topology import TensorParallel


def training_method(config: RunConfig) -> TrainingMethod:
    """The method that `config.method` names."""
    if isinstance(config.method, FullFineTuning):
        return FullFineTuningMethod()
    return Scale(config.method, config.upscaled_folder, config.seed)


def build_model(config: RunConfig, base: BaseFolder, tp: TensorParallel) -> Decoder:
    """The run's model with this rank's shards, its values not yet set; `requires_grad` says what trains."""
    return training_method(config).build(base.spec, tp, config.activation_checkpointing)


def load_initial_weights(model: Decoder, config: RunConfig, base: BaseFolder, tp: TensorParallel) -> None:
    """Sets every parameter of `model` to its value before the first step."""
    training_method(config).load(model, base, tp)
