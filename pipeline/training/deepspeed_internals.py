"""All uses of DeepSpeed's undocumented attributes; no other module reads or sets them.

Tried with DeepSpeed 0.19.8. The tests of training and conversion check that each attribute still means the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedReader
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline.checkpoint.rank_files import CheckpointReader, Kind
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import ConfigError, in_one_line
from pipeline.model.decoder import is_layer_matrix
from pipeline.parallel.sharding import (
    OptimizerShard,
    ZeroPartition,
    named_trained_parameters,
    zero_partition_of,
)
from pipeline.parallel.topology import Layout, ProcessGroups, TensorParallel
from pipeline.training.muon import Muon, moments_of

# DeepSpeed calls torch's collectives by names that torch is about to retire.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")


def init_distributed(backend: str, timeout: timedelta) -> None:
    """Joins the ranks that the environment describes."""
    if backend == "gloo":
        # Otherwise its first use compiles a shared-memory all-reduce for 33 s, which gloo does not need.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
    )


def check_config(config: RunConfig, deepspeed_config: DeepSpeedConfig, layout: Layout) -> None:
    """Raises ConfigError, in one line, for a file that DeepSpeed's own reader refuses."""
    values = deepspeed_config.merged(config.schedule, layout)
    micro_batches = config.schedule.micro_batch_size * values["gradient_accumulation_steps"]
    # DeepSpeed compares it with the number of data-parallel ranks, for which it takes all ranks here.
    values["train_batch_size"] = micro_batches * dist.get_world_size()
    try:
        DeepSpeedReader(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
        )
        raise ConfigError(
            f"{deepspeed_config.path}: DeepSpeed refuses it: {faults}; correct the file"
        ) from None
    # Its reader has no error of its own: it raises what a value of another type happens to make.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(
            f"{deepspeed_config.path}: DeepSpeed refuses it: {in_one_line(error)}; correct the file"
        ) from None


# --- Parameters under ZeRO-3 -----------------------------------------------------------------------------------------


def partitioning_context(
    config: RunConfig, deepspeed_config: DeepSpeedConfig, groups: ProcessGroups
) -> AbstractContextManager[Any]:
    """Within it, ZeRO-3 partitions each parameter on creation; call `attach_zero_partitions` afterwards."""
    if not deepspeed_config.partitions_at_once:
        return nullcontext()
    context: AbstractContextManager[Any] = _PartitionedUnset(
        data_parallel_group=groups.get_data_parallel_group(),
        config_dict_or_path=deepspeed_config.merged(config.schedule, groups.layout),
        mpu=groups,
        mem_efficient_linear=False,  # otherwise it would replace torch's linear map permanently
    )
    return context


class _PartitionedUnset(deepspeed.zero.Init):  # type: ignore[misc]
    """Partitions parameters without broadcasting their values, which are not set yet: their memory is never touched."""

    def _zero_init_param(self, param: nn.Parameter) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()  # type: ignore[attr-defined]


def attach_zero_partitions(model: nn.Module) -> None:
    """Puts a `ZeroPartition` on every parameter that ZeRO-3 has partitioned, as `zero_partition`."""
    parameter: Any  # it has DeepSpeed's attributes
    for parameter in model.parameters():
        if hasattr(parameter, "ds_tensor"):
            values, shard_size = parameter.ds_tensor, parameter.ds_numel
            first = min(shard_size, values.ds_numel * dist.get_rank(parameter.ds_process_group))
            parameter.zero_partition = ZeroPartition(
                values, first, min(values.ds_numel, shard_size - first)
            )


# --- Weights and optimizer state: to a checkpoint, and from one of any layout -----------------------------------------
# Every rank saves and reads what its own optimizer holds. In the same layout the state is restored exactly.


@torch.no_grad()
def optimizer_state(
    engine: Any, model: nn.Module
) -> tuple[dict[str, int], dict[str, Tensor], Tensor]:
    """What this rank's optimizer holds: `first`, `values` (views) and `adam_step` of a `RankState`; no collective."""
    first, values, adam_step = {}, {}, torch.tensor(0.0)
    for name, shard in _optimizer_shards(model, engine.optimizer):
        slots, moments = _slots(engine, name, shard)
        first[name], adam_step = shard.first, slots["step"].clone()
        values[f"{name}/fp32"] = shard.within(shard.flat)
        values |= {f"{name}/{moment}": shard.within(slots[moment]) for moment in moments}
    return first, values, adam_step


@torch.no_grad()
def restore(engine: Any, model: nn.Module, reader: CheckpointReader, tp: TensorParallel) -> None:
    """Sets the fp32 weights, moments and step count of this rank's optimizer; no collective. `publish` follows."""
    for name, shard in _optimizer_shards(model, engine.optimizer):
        slots, moments = _slots(engine, name, shard)
        slots["step"] = reader.adam_step.clone().to(shard.flat.device)
        span = (shard.first, shard.first + shard.length)
        shard.within(shard.flat).copy_(reader.read_span(name, "fp32", tp.rank, tp.size, span))
        for moment in moments:
            shard.within(slots[moment]).copy_(
                reader.read_span(name, moment, tp.rank, tp.size, span)
            )


def _slots(
    engine: Any, name: str, shard: OptimizerShard
) -> tuple[dict[str, Tensor], tuple[Kind, ...]]:
    """What the optimizer holds for `shard.flat`, as it makes it itself if it has made no step yet, and its moments."""
    optimizer = engine.optimizer.optimizer
    slots: dict[str, Tensor] = optimizer.state[shard.flat]
    moments = moments_of(optimizer, name, shard.parameter)
    if not slots:
        slots["step"] = torch.zeros((), device=shard.flat.device)
        slots |= {moment: torch.zeros_like(shard.flat, requires_grad=False) for moment in moments}
    return slots, moments


@torch.no_grad()
def publish(engine: Any, model: nn.Module, step: int) -> None:
    """Copies the restored weights into the model and sets the engine's step count; every rank must call it."""
    engine.global_steps = step
    optimizer = engine.optimizer
    if not _is_zero3(optimizer):
        optimizer.update_lp_params()
        return
    # Every rank keeps small parameters whole; the epilogue gathers them again from the partitions set here.
    optimizer.checkpoint_event_prologue()
    for _, shard in _optimizer_shards(model, optimizer):
        partition = zero_partition_of(shard.parameter)
        assert partition is not None
        partition.values[: shard.length].copy_(shard.within(shard.flat))
    optimizer.checkpoint_event_epilogue()


def _optimizer_shards(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, OptimizerShard]]:
    """What this rank's optimizer holds of each trained parameter, by name."""
    for name, parameter in named_trained_parameters(model):
        shard = (
            _shard_of_zero3(parameter, optimizer)
            if _is_zero3(optimizer)
            else _shard(parameter, optimizer)
        )
        if shard is not None and shard.length > 0:
            yield name, shard


def attach_muon(engine: Any, model: nn.Module, groups: ProcessGroups) -> None:
    """Tells Muon, if that is the optimizer, what this rank holds of its matrices; every rank in one order."""
    optimizer, muon = engine.optimizer, engine.optimizer.optimizer
    if not isinstance(muon, Muon):
        return
    matrices = {
        name: weight
        for name, weight in named_trained_parameters(model)
        if is_layer_matrix(name, weight)
    }
    if _is_zero3(optimizer):
        muon.attach([_shard_of_zero3(weight, optimizer) for weight in matrices.values()], groups)
        return
    flat_of: dict[str, Tensor] = {}
    for group in muon.param_groups:
        (flat,) = group["params"]
        flat_of |= dict.fromkeys(group["names"], flat)
    shards: list[OptimizerShard] = []
    for name, weight in matrices.items():
        # A rank that holds no element of a matrix still takes part in putting it together.
        shards.append(_shard(weight, optimizer) or OptimizerShard(weight, flat_of[name], 0, 0, 0))
    muon.attach(shards, groups)


def _is_zero3(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _shard_of_zero3(parameter: nn.Parameter, optimizer: Any) -> OptimizerShard:
    """ZeRO-3 cuts every parameter into equal shards, the last of which are padded."""
    group, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    partition = zero_partition_of(parameter)
    assert partition is not None
    return OptimizerShard(parameter, flat, start, partition.first, partition.length)


def _shard(parameter: nn.Parameter, optimizer: Any) -> OptimizerShard | None:
    """ZeRO-1 and 2 concatenate the parameters of a group and cut the result: a rank may hold none of a parameter."""
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
    in_flat, in_shard = mapping.hp_fragment_address, mapping.lp_fragment_address
    return OptimizerShard(parameter, flat, in_flat.start, in_shard.start, in_flat.numel)
