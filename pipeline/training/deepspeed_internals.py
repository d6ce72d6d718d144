"""All uses of DeepSpeed's undocumented attributes; no other module reads or sets them.

Tried with DeepSpeed 0.19.8. The tests of training and conversion check that each attribute still
means the same.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedReader
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline.checkpoint.rank_files import CheckpointReader, Stored
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import ConfigError, ExtensionError, in_one_line
from pipeline.optimizers.optimizer import Optimizer, moments_of
from pipeline.parallel.sharding import (
    OptimizerShard,
    ZeroPartition,
    named_trained_parameters,
    partition_of,
    zero_partition_of,
)
from pipeline.parallel.topology import Layout, ProcessGroups, TensorParallel

# DeepSpeed calls torch's collectives by names that torch is about to retire.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a record of DeepSpeed's is more than that it does not know an optimizer.

    It warns of each optimizer that is not its own, such as Muon, and says nothing a user could do.
    """
    return "untested optimizer" not in record.getMessage()


logging.getLogger("DeepSpeed").addFilter(_is_of_use)


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


@contextmanager
def frozen_kept_as_read(model: nn.Module) -> Iterator[None]:
    """While DeepSpeed's engine is made inside, it broadcasts what trains, and nothing frozen.

    Each rank has read the frozen parameters itself, and `parallel.replicas` has compared them.
    DeepSpeed's ZeRO-1 and 2 would send the whole base from one rank to all others.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        # DeepSpeed's mark of the frozen weights of its own LoRA, which differ from rank to rank.
        parameter.ds_optim_param = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in frozen:
            del parameter.ds_optim_param  # type: ignore[attr-defined]


# --- Parameters under ZeRO-3 ---


def partitioning_context(
    config: RunConfig, deepspeed_config: DeepSpeedConfig, groups: ProcessGroups
) -> AbstractContextManager[Any]:
    """Within it, ZeRO-3 partitions each parameter on creation.

    `attach_zero_partitions` follows.
    """
    if not deepspeed_config.partitions_at_once:
        return nullcontext()
    context: AbstractContextManager[Any] = _PartitionedUnset(
        data_parallel_group=groups.get_data_parallel_group(),
        config_dict_or_path=deepspeed_config.merged(config.schedule, groups.layout),
        mpu=groups,
        # Otherwise it would replace torch's linear map permanently.
        mem_efficient_linear=False,
    )
    return context


class _PartitionedUnset(deepspeed.zero.Init):  # type: ignore[misc]
    """Partitions parameters without broadcasting their values, which are not set yet.

    The memory of the whole parameters is never touched.
    """

    def _zero_init_param(self, param: nn.Parameter) -> None:
        # DeepSpeed's own version broadcasts each parameter from rank 0 first. Here every rank then
        # reads its partition from the files itself.
        if partition_of(param).expert_size > 1:
            return  # see `keep_shared_experts_whole`
        self._convert_to_deepspeed_param(param)
        param.partition()  # type: ignore[attr-defined]


def attach_zero_partitions(model: nn.Module) -> None:
    """Sets `zero_partition` of every parameter that ZeRO-3 has partitioned."""
    parameter: Any  # with DeepSpeed's attributes
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_tensor"):
            continue
        if not hasattr(parameter, "full_shape"):
            # Of a module of transformers; ours set it themselves.
            parameter.full_shape = tuple(parameter.ds_shape)
        values = parameter.ds_tensor
        shard_size = parameter.ds_numel
        zero_rank = dist.get_rank(parameter.ds_process_group)
        # All ranks' partitions are of one size: the last ones are padded, or hold nothing.
        first = min(shard_size, values.ds_numel * zero_rank)
        length = min(values.ds_numel, shard_size - first)
        parameter.zero_partition = ZeroPartition(values, first, length)


def keep_shared_experts_whole(model: nn.Module) -> None:
    """Hides from ZeRO-3 the experts that data-parallel ranks share, before the engine is made.

    Each of these ranks holds other experts, so that there is nothing to gather. ZeRO-3 partitions
    every parameter of a model, but no buffer.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if partition_of(parameter).expert_size > 1:
                delattr(module, name)
                module.register_buffer(name, parameter, persistent=False)


def gather_whole(modules: Iterable[nn.Module]) -> None:
    """Makes ZeRO-3 gather each of `modules` with all its parts, before the engine is made.

    Their parameters must all be frozen: the backward pass of such a module fails where some train.
    """
    for module in modules:
        deepspeed.utils.set_z3_leaf_module(module, True)


def leave_gradients_in_place(engine: Any, layout: Layout) -> None:
    """Stops ZeRO-1 from copying the gradients of a single data-parallel rank, after the engine is
    made.

    DeepSpeed copies them into a bucket, divides by 1, and copies them into a second buffer, which
    for 135 M parameters in fp32 takes as long as 60 tokens of a step. The values are the same to
    the bit. ZeRO-2 reduces while gradients come, 16-bit weights round them to a type of their own,
    and ZeRO-3 has no buckets: these stay as they are. bf16 with gradients in fp32 is another
    optimizer of DeepSpeed, `BF16_Optimizer`, without these buckets.
    """
    optimizer = engine.optimizer
    if layout.dp_size > 1 or not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    changes_gradients = (
        optimizer.partition_gradients
        or optimizer.overlap_comm
        or optimizer.cpu_offload
        or optimizer.use_grad_accum_attribute
        or optimizer.gradient_accumulation_dtype != optimizer.dtype
        or optimizer.communication_data_type != optimizer.dtype
    )
    if not changes_gradients:
        optimizer.reduce_independent_p_g_buckets_and_remove_grads = _nothing_to_reduce


def _nothing_to_reduce(parameter: Tensor, group: int) -> None:
    """Takes the place of DeepSpeed's method of adding a gradient to a bucket."""


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


# --- Weights and optimizer state: to a checkpoint, and from one of any layout ---
#
# Every rank saves and reads what its own optimizer holds. In the same layout the state is restored
# exactly.


@torch.no_grad()
def optimizer_state(
    engine: Any, model: nn.Module, chosen: Optimizer
) -> tuple[dict[str, int], dict[str, Tensor], dict[str, Tensor]]:
    """What this rank's optimizer holds: `first` and `values` of a `RankState`, and step counts.

    The step counts are by parameter, as the values are. Values are views, counts are none. It is no
    collective.
    """
    first: dict[str, int] = {}
    values: dict[str, Tensor] = {}
    adam_steps: dict[str, Tensor] = {}
    for name, shard in _optimizer_shards(model, engine.optimizer):
        slots, moments = _slots(engine, chosen, name, shard)
        first[name] = shard.first
        adam_steps[name] = slots["step"].clone()
        values[f"{name}/fp32"] = shard.within(shard.flat)
        for moment in moments:
            values[f"{name}/{moment}"] = shard.within(slots[moment])
    return first, values, adam_steps


@torch.no_grad()
def restore(
    engine: Any, model: nn.Module, chosen: Optimizer, reader: CheckpointReader, tp: TensorParallel
) -> None:
    """Sets the fp32 weights, moments and step count of this rank's optimizer.

    It is no collective; `publish` follows.
    """
    for name, shard in _optimizer_shards(model, engine.optimizer):
        slots, moments = _slots(engine, chosen, name, shard)
        adam_step = reader.adam_step(name)
        slots["step"] = adam_step.to(shard.flat.device)
        span = (shard.first, shard.first + shard.length)
        weights = reader.read_span(name, "fp32", tp.rank, tp.size, span)
        shard.within(shard.flat).copy_(weights)
        for moment in moments:
            if adam_step == 0:
                # It begins to train here: the checkpoint may hold no moments of it.
                shard.within(slots[moment]).zero_()
                continue
            values = reader.read_span(name, moment, tp.rank, tp.size, span)
            shard.within(slots[moment]).copy_(values)


def _slots(
    engine: Any, chosen: Optimizer, name: str, shard: OptimizerShard
) -> tuple[dict[str, Tensor], tuple[Stored, ...]]:
    """What the optimizer holds for `shard.flat`, and the names of its moments.

    Before the first step the optimizer has no state: it is made here as the optimizer would.
    """
    optimizer = engine.optimizer.optimizer
    slots: dict[str, Tensor] = optimizer.state[shard.flat]
    moments = moments_of(chosen, name, shard.parameter)
    if not slots:
        slots["step"] = torch.zeros((), device=shard.flat.device)
        for moment in moments:
            slots[moment] = torch.zeros_like(shard.flat, requires_grad=False)
    return slots, moments


def check_moments(engine: Any, model: nn.Module, chosen: Optimizer) -> None:
    """Checks that an update stored what checkpoints save. It is no collective.

    Raises:
        ExtensionError: it stored something else than `moments` of the run's optimizer, or than
            AdamW's of what that leaves to AdamW.
    """
    states = engine.optimizer.optimizer.state
    for name, shard in _optimizer_shards(model, engine.optimizer):
        state = states.get(shard.flat, {})
        expected = ["step", *moments_of(chosen, name, shard.parameter)]
        if sorted(state) != sorted(expected):
            raise ExtensionError(
                f"schedule.optimizer {chosen.name}: its step stores "
                f"{', '.join(sorted(state)) or 'nothing'} of "
                f"{name}, expected {', '.join(expected)}, which checkpoints save; correct the "
                "optimizer's step, or its moments"
            )


@torch.no_grad()
def publish(engine: Any, model: nn.Module, step: int) -> None:
    """Copies the restored weights into the model and sets the engine's step count.

    Every rank must call it.
    """
    engine.global_steps = step
    optimizer = engine.optimizer
    if not _is_zero3(optimizer):
        # Rounds each rank's fp32 part to 16 bits and gathers the parts over the data-parallel
        # ranks, as at the end of every step.
        optimizer.update_lp_params()
        return
    # Every rank keeps small parameters whole; the epilogue gathers them again from the partitions
    # set here.
    optimizer.checkpoint_event_prologue()
    for _, shard in _optimizer_shards(model, optimizer):
        partition = zero_partition_of(shard.parameter)
        assert partition is not None
        partition.values[: shard.length].copy_(shard.within(shard.flat))
    optimizer.checkpoint_event_epilogue()


def _optimizer_shards(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, OptimizerShard]]:
    """What this rank's optimizer holds of each trained parameter, by name."""
    for name, parameter in named_trained_parameters(model):
        shard: OptimizerShard | None
        if _is_zero3(optimizer):
            shard = _shard_of_zero3(parameter, optimizer)
        else:
            shard = _shard(parameter, optimizer)
        if shard is not None and shard.length > 0:
            yield name, shard


def attach_optimizer(
    engine: Any, model: nn.Module, chosen: Optimizer, groups: ProcessGroups
) -> None:
    """Tells the optimizer what this rank holds of the parameters that it updates.

    Every rank tells it of the same parameters in the same order: of some it may hold nothing.
    """
    optimizer = engine.optimizer
    made = optimizer.optimizer
    if not chosen.needs_shards:
        return
    shards: list[OptimizerShard] = []
    for name, weight in named_trained_parameters(model):
        if not chosen.updates(name, weight):
            continue
        if _is_zero3(optimizer):
            shards.append(_shard_of_zero3(weight, optimizer))
            continue
        # ZeRO-1 and 2 keep a group as one flat tensor.
        (flat,) = next(group["params"] for group in made.param_groups if name in group["names"])
        nothing = OptimizerShard(weight, flat, 0, 0, 0)
        shards.append(_shard(weight, optimizer) or nothing)
    if shards:
        chosen.attach(made, shards, groups)


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
    """ZeRO-1 and 2 concatenate the parameters of a group and cut the result.

    A rank may hold nothing of a parameter: then it has no shard.
    """
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    # "hp" is the optimizer's fp32 copy and "lp" the 16-bit parameter, in DeepSpeed's words. The
    # mapping was made for universal checkpoints; a parameter's part begins anywhere in either.
    (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
    in_flat = mapping.hp_fragment_address  # where the part lies in the optimizer's fp32 values
    in_shard = mapping.lp_fragment_address  # where it lies in the parameter, flattened
    return OptimizerShard(parameter, flat, in_flat.start, in_shard.start, in_flat.numel)
