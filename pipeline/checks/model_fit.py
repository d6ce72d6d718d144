"""Whether the model of a run can be built on a base, and which parameter groups it then has.

The model is built on the meta device, where it takes no memory, and on imagined ranks, which call
no collectives: a laptop can check a run of a thousand GPUs.
"""

from __future__ import annotations

from collections import Counter

import torch

from pipeline.config.run import RunConfig
from pipeline.config.stage_plan import training_stages
from pipeline.errors import ConfigError
from pipeline.methods.build_model import build_model
from pipeline.methods.parameter_groups import GroupRow, group_rows
from pipeline.methods.registry import training_method
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import GATE_LAYER, checked_gate_layer
from pipeline.sizing.imagined_ranks import imagined_expert_ranks, imagined_ranks


def check_fits(config: RunConfig, spec: DecoderSpec) -> None:
    """Builds the run's model on a base of this architecture, without memory or collectives.

    Raises:
        ConfigError: The method, the layout, the gate's layer or the sequence length does not fit
            the base.
    """
    longest = spec.max_position_embeddings
    # Rotary angles beyond the base's context were never trained. Most bases write nonsense there,
    # and nothing raises an error.
    lengths = {"data": config.data.sequence_length}
    for stage in config.stages:
        if stage.sequence_length is not None:
            lengths[f"stages.{stage.name}"] = stage.sequence_length
    for section, length in lengths.items():
        if length > longest:
            raise ConfigError(
                f"{section}.sequence_length: {length} is beyond the base's context of {longest} "
                f"tokens; use at most {longest}"
            )
    parallel = config.parallel
    ranks = imagined_ranks(
        parallel.tp_size,
        Counter(),
        sequence_parallel=parallel.sequence_parallel,
        expert_parallel=imagined_expert_ranks(parallel.expert_size, Counter()),
    )
    with torch.device("meta"):
        # The whole run first, which checks `trains` of all stages, and data.sequence_length. Then
        # each stage, which may have another sequence length.
        model = build_model(config, spec, ranks)
        if config.stages:
            for stage_of_run in training_stages(config):
                build_model(stage_of_run.config, spec, ranks)
    if config.gate is not None:
        if model.plan is not None:
            model.plan.gate_layer(config.gate.layer)
        else:
            # Full fine-tuning: the gate reads the base, which runs beside the trained model.
            checked_gate_layer(config.gate.layer, GATE_LAYER, spec.num_layers)


def read_parameter_groups(config: RunConfig, spec: DecoderSpec) -> list[GroupRow]:
    """The table of parameter groups of a run on a base of this architecture.

    A run in stages has a table for each stage, one after the other.

    Raises:
        ConfigError: a factor of the schedule, or a stage's `trains`, is for parameters that are not
            there.
    """
    rows: list[GroupRow] = []
    with torch.device("meta"):
        if not config.stages:
            model = training_method(config).build(spec, SINGLE, "none")
            return group_rows(model, config.schedule)
        for stage in training_stages(config):
            model = build_model(stage.config, spec, SINGLE)
            rows += group_rows(
                model,
                stage.config.schedule,
                stage=stage.name,
                frozen_in_stage=model.frozen_in_stage,
            )
    return rows
