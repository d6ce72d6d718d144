"""The model's parameters under DeepSpeed: what is frozen, and what ZeRO-3 partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch.distributed as dist
from torch import nn

from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.parallel.parameters import ZeroPartition, partition_of
from pipeline.parallel.topology import ProcessGroups


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
