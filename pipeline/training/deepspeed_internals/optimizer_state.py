"""Weights and optimizer state: to a checkpoint, and from one of any layout.

Every rank saves and reads what its own optimizer holds. In the same layout the state is restored
exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint.rank_files import CheckpointReader, Stored
from pipeline.errors import ExtensionError
from pipeline.optimizers.optimizer import Optimizer, moments_of
from pipeline.parallel.parameters import (
    OptimizerShard,
    named_trained_parameters,
    zero_partition_of,
)
from pipeline.parallel.topology import ProcessGroups, TensorParallel


@torch.no_grad()
def held_by_rank(
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
