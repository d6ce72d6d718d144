"""The model that a run trains, by its method and the settings that hold for all methods."""

from __future__ import annotations

from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.methods.parameter_groups import matching
from pipeline.methods.registry import training_method
from pipeline.model.bases import kind_of
from pipeline.model.causal_decoder import ActivationCheckpointing, CausalDecoder
from pipeline.model.recomputation import KeptResults
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameters import named_trained_parameters, partition_of
from pipeline.parallel.quantized import DEFAULT_RECIPE, Fp8Recipe, QuantizedPrecision
from pipeline.parallel.topology import TensorParallel, check_sequence_length


def build_model(
    config: RunConfig,
    spec: DecoderSpec,
    tp: TensorParallel,
    activation_checkpointing: ActivationCheckpointing | None = None,
    kept_results: KeptResults | None = None,
) -> CausalDecoder:
    """The model that a run trains, with this rank's shards, uninitialised.

    `requires_grad` is set where parameters train, in any of the stages of `config`. Where the run
    learns self-generated text by KL and the base itself trains, the model has a frozen copy of the
    base. With `base_precision` the base's linear maps are quantised.

    Args:
        config: the run.
        spec: the base's architecture.
        tp: this rank's place in its tensor-parallel group.
        activation_checkpointing: takes the place of the run's setting.
        kept_results: takes the place of the run's `recomputation_keeps`.

    Raises:
        UserError: the model, or its sequences, cannot be split over the ranks.
        ConfigError: `compile` with a mixture of experts, `parallel.expert_size` with experts that
            train, a stage's `trains` that matches nothing, or a setting that bases of this kind
            cannot have.
    """
    check_sequence_length(config.data.sequence_length, tp)
    kind_of(spec).check_run(config, spec, tp.size)
    if config.compile and spec.mixture is not None:
        raise ConfigError(
            "compile: expected false: nothing has run a compiled mixture of experts yet "
            "(docs/gpu.md)"
        )
    model = training_method(config).build(
        spec, tp, activation_checkpointing or config.activation_checkpointing
    )
    check_shared_experts_frozen(model, config)
    model.kept_results = kept_results or config.recomputation_keeps
    model.output.kl_coefficient = config.data.kl_coefficient
    if config.data.kl_fraction > 0 and not model.keeps_base:
        model.add_reference()
    if config.base_precision != "bf16":
        recipe = Fp8Recipe(**config.fp8.model_dump())
        quantize_base(model, config.base_precision, recipe)
    if config.stages:
        rest_all_but_stages(model, config)
    return model


def check_shared_experts_frozen(model: CausalDecoder, config: RunConfig) -> None:
    """Checks that no experts train that data-parallel ranks share.

    Raises:
        ConfigError: some do.
    """
    for name, parameter in named_trained_parameters(model):
        size = partition_of(parameter).expert_size
        if size > 1:
            raise ConfigError(
                f"parallel.expert_size: expected 1 with method.name {config.method.name}, which "
                f"trains experts ({name}), found {size}; take scale or lora, or ZeRO-3 without it"
            )


def rest_all_but_stages(model: CausalDecoder, config: RunConfig) -> None:
    """Freezes what the method trains, but none of the stages of `config`.

    Their names are then `model.frozen_in_stage`.

    Raises:
        ConfigError: a kind of block or a pattern in `trains` matches nothing.
    """
    trained = dict(named_trained_parameters(model))
    kept: set[str] = set()
    for stage in config.stages:
        for key in stage.trains:
            kept.update(matching(key, trained, setting=f"stages.{stage.name}.trains"))
    if not config.trains:
        return  # One of the stages trains everything.
    frozen_in_stage: list[str] = []
    for name, parameter in trained.items():
        if name not in kept:
            parameter.requires_grad_(False)
            frozen_in_stage.append(name)
    model.frozen_in_stage = tuple(frozen_in_stage)


def quantize_base(
    model: CausalDecoder, precision: QuantizedPrecision, recipe: Fp8Recipe = DEFAULT_RECIPE
) -> None:
    """Stores the base's linear maps, unset yet, in `precision`; in fp8 as `recipe` says.

    Embedding, norms and output projection stay; where transformers computes the base, also
    experts.

    Raises:
        ConfigError: if one of them trains, or cannot be split over the ranks in `precision`.
    """
    kind_of(model.spec).quantize_maps(model, precision, recipe)
