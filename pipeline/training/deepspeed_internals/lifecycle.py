"""How DeepSpeed is started: its process group, its reader of the configuration, and the end of an
engine."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedReader
from pydantic import ValidationError
from torch import nn

from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import ConfigError, in_one_line
from pipeline.parallel.parameters import partition_of
from pipeline.parallel.topology import Layout


def _prints_nothing(message: str, force: bool = False) -> None:
    """In place of `see_memory_usage`, which prints lines without a name or a time."""


bf16_optimizer.see_memory_usage = _prints_nothing


def init_distributed(backend: str, timeout: timedelta) -> None:
    """Joins the ranks that the environment describes."""
    if backend == "gloo":
        # Otherwise its first use compiles a shared-memory all-reduce for 33 s, which gloo does not
        # need.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
    )


def check_config(config: RunConfig, deepspeed_config: DeepSpeedConfig, layout: Layout) -> None:
    """Lets DeepSpeed's own reader check the file.

    Raises:
        ConfigError: the reader refuses it.
    """
    values = deepspeed_config.merged(config.schedule, layout)
    micro_batches = config.schedule.micro_batch_size * values["gradient_accumulation_steps"]
    # DeepSpeed compares it with the number of data-parallel ranks, for which it takes all ranks
    # here.
    values["train_batch_size"] = micro_batches * dist.get_world_size()
    fault = ""
    try:
        DeepSpeedReader(values)
    except ValidationError as error:
        faults = []
        for one in error.errors():
            setting = ".".join(map(str, one["loc"]))
            faults.append(f"{setting}: {one['msg']}")
        fault = "; ".join(faults)
    # Its reader has no error of its own: it raises what a value of another type happens to make.
    except Exception as error:  # noqa: BLE001
        fault = in_one_line(error)
    if fault:
        raise ConfigError(
            f"{deepspeed_config.path}: DeepSpeed refuses it: {fault}; correct the file"
        )


def destroy(engine: Any, model: nn.Module) -> None:
    """Ends an engine and frees the memory of its model and optimizer; neither works afterwards.

    Dropping the engine is not enough: under ZeRO-3 what DeepSpeed leaves behind still refers to the
    modules and to the optimizer.
    """
    optimizer = engine.optimizer
    engine.destroy()
    shared_experts = [one for one in model.buffers() if partition_of(one).expert_size > 1]
    parameter: Any  # with DeepSpeed's attributes
    for parameter in (*model.parameters(), *shared_experts):
        parameter.grad = None
        for values in (parameter.data, getattr(parameter, "ds_tensor", None)):
            if values is not None and values.untyped_storage().resizable():
                values.untyped_storage().resize_(0)
    optimizer.optimizer.state.clear()
    # With the fp32 weights, gradients and buffers.
    vars(optimizer).clear()
