"""The model before a run's first step: built where it trains, and read from the base's files."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from pipeline import log
from pipeline.checks.inputs import RunInputs
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.methods.build_model import build_model
from pipeline.model.base_folder import BaseFolder
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.ranks import run_on_all_ranks
from pipeline.parallel.replicas import check_frozen_replicas
from pipeline.parallel.topology import ProcessGroups
from pipeline.training.deepspeed_internals import zero_parameters

_logger = log.get_logger(__name__)


def load_model(
    inputs: RunInputs, config: RunConfig, groups: ProcessGroups, device: torch.device
) -> CausalDecoder:
    """The model before the run's first step; each rank reads only what it will hold.

    `config` is that of the run, or of one of its stages. Every rank must call it.

    Raises:
        UserError: on the lowest rank that cannot read what it needs. The other ranks raise
            SystemExit.
        BaseModelError: on the lowest rank that read other frozen weights than the first rank with
            its shard. The other ranks raise SystemExit.
    """
    started = time.perf_counter()
    model = build_on_device(config, inputs.base, inputs.deepspeed_config, groups, device)
    run_on_all_ranks(partial(inputs.method.load, model, inputs.base, groups.tensor_parallel))
    check_frozen_replicas(model, groups.get_data_parallel_group(), groups.layout.expert_size)
    _logger.info("loaded %s in %.1f s", inputs.base.path, time.perf_counter() - started)
    return model


def build_on_device(
    config: RunConfig,
    base: BaseFolder,
    deepspeed_config: DeepSpeedConfig,
    groups: ProcessGroups,
    device: torch.device | None = None,
) -> CausalDecoder:
    """The run's model with unset values; every rank must call it.

    A rank holds at most the shard that it will train. Under ZeRO-1 and 2 the model is made on
    `device`, where it stays: the shards of a node's ranks may not fit its host memory.
    """
    partitioning = zero_parameters.partitioning_context(config, deepspeed_config, groups)
    on_device: AbstractContextManager[Any] = nullcontext()
    if device is not None and deepspeed_config.zero_stage < 3:
        on_device = device
    with default_dtype(deepspeed_config.dtype), partitioning, on_device:
        model = build_model(config, base.spec, groups.tensor_parallel)
    zero_parameters.attach_zero_partitions(model)
    return model
