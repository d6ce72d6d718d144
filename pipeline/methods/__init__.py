"""The training methods, SCALE and the baselines, behind one interface."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.method import Freeze, FullFineTuning, LlamaPro, Lora, Method, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.methods.baselines import (
    FreezeMethod,
    FullFineTuningMethod,
    LlamaProMethod,
    LoraMethod,
)
from pipeline.methods.method import TrainingMethod
from pipeline.methods.scale import Scale
from pipeline.model.decoder import ActivationCheckpointing, Decoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.quantized import QuantizedPrecision, stored_parameter
from pipeline.parallel.topology import TensorParallel, check_sequence_length
from pipeline.scale.widened_linear import base_maps


def method_for(
    settings: Method,
    expansion_folder: Path,
    seed: int,
    own_tokens: tuple[int, ...] | None = None,
) -> TrainingMethod:
    """The method of `settings`; one whose initial values are in a folder reads them from
    `expansion_folder`.

    `seed` determines random initial values. `own_tokens` are the ids that have rows of their own,
    where no expansion folder says so.
    """
    match settings:
        case ScaleMethod():
            return Scale(settings, expansion_folder, seed, own_tokens)
        case FullFineTuning():
            return FullFineTuningMethod()
        case Freeze():
            return FreezeMethod(settings)
        case Lora():
            return LoraMethod(settings, expansion_folder, seed, own_tokens)
        case LlamaPro():
            return LlamaProMethod(settings)


def training_method(config: RunConfig) -> TrainingMethod:
    """The method of a run."""
    return method_for(config.method, config.initial_expansion_folder, config.seed)


def build_model(
    config: RunConfig,
    spec: DecoderSpec,
    tp: TensorParallel,
    activation_checkpointing: ActivationCheckpointing | None = None,
) -> Decoder:
    """The model that a run trains, with this rank's shards, uninitialised.

    `requires_grad` is set where parameters train. Where the run learns self-generated text by KL
    and the base itself trains, the model has a frozen copy of the base. With `base_precision` the
    base's linear maps are quantised.

    Args:
        config: the run.
        spec: the base's architecture.
        tp: this rank's place in its tensor-parallel group.
        activation_checkpointing: takes the place of the run's setting.

    Raises:
        UserError: the model, or its sequences, cannot be split over the ranks.
        ConfigError: `compile` with a mixture of experts.
    """
    check_sequence_length(config.data.sequence_length, tp)
    if config.compile and spec.mixture is not None:
        raise ConfigError(
            "compile: expected false: where tokens go in a mixture of experts is known at run time "
            "only"
        )
    model = training_method(config).build(
        spec, tp, activation_checkpointing or config.activation_checkpointing
    )
    model.output.kl_coefficient = config.data.kl_coefficient
    if config.data.kl_fraction > 0 and not model.keeps_base:
        model.add_reference()
    if config.base_precision != "bf16":
        quantize_base(model, config.base_precision)
    return model


def quantize_base(model: Decoder, precision: QuantizedPrecision) -> None:
    """Stores the base's linear maps, unset yet, in `precision`.

    Embedding, norms and output projection stay.

    Raises:
        ConfigError: if one of them trains, or cannot be split over the ranks in `precision`.
    """
    for path, module in base_maps(model).items():
        weight = module.get_parameter("weight")
        stored = stored_parameter(weight, precision, path, model.tp.size)
        module.register_parameter("weight", stored)
