"""Parameters that are frozen in a stage: the run's method trains them, but that stage does not.

Such a parameter is part of the frozen model. Its fp32 weights, moments and step count wait in the
host's memory, divided among the data-parallel ranks, and are part of every checkpoint: a later
stage, or an export, finds them there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from pipeline.checkpoint.rank_files import CheckpointReader, Stored
from pipeline.config.schedule import Schedule
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.optimizers.optimizer import moments_of, optimizer_named
from pipeline.parallel.parameters import (
    fill,
    full_shape_of,
    held_values,
    partition_of,
    zero_partition_of,
)
from pipeline.parallel.sharding import Rows, local_shape
from pipeline.parallel.topology import ProcessGroups, TensorParallel


@dataclass(frozen=True)
class ParameterFrozenInStage:
    """What this rank keeps of a parameter: a run of the elements of its flattened shard.

    Attributes:
        first: the first of these elements.
        values: on the host, [n] in fp32: the weights, and the moments if it has trained.
        adam_step: how many steps Adam has counted; 0 if it has not trained yet.
    """

    first: int
    values: dict[Stored, Tensor]
    adam_step: int


def initially_frozen(
    model: CausalDecoder, groups: ProcessGroups
) -> dict[str, ParameterFrozenInStage]:
    """What the first stage of a run freezes in `model`, by name. It is no collective."""
    frozen_in_stage: dict[str, ParameterFrozenInStage] = {}
    for name, parameter in _parameters_frozen_in_stage(model):
        first, length = _own_part(parameter, groups)
        if length == 0:
            continue
        held = held_values(parameter).detach().flatten()
        if zero_partition_of(parameter) is None:
            held = held[first:]
        weights = held[:length].to("cpu", torch.float32, copy=True)
        frozen_in_stage[name] = ParameterFrozenInStage(first, {"fp32": weights}, 0)
    return frozen_in_stage


def restored_frozen(
    model: CausalDecoder, groups: ProcessGroups, schedule: Schedule, reader: CheckpointReader
) -> dict[str, ParameterFrozenInStage]:
    """What a stage freezes in `model`, from a checkpoint of any layout, by name. No collective.

    It also sets these weights in the model, before DeepSpeed wraps it. They round as DeepSpeed
    rounded the fp32 weights while they trained.
    """
    tp = groups.tensor_parallel
    frozen_in_stage: dict[str, ParameterFrozenInStage] = {}
    for name, parameter in _parameters_frozen_in_stage(model):
        fill(parameter, tp, partial(_read_rows, reader, name, parameter, tp))
        first, length = _own_part(parameter, groups)
        if length == 0:
            continue
        adam_step = int(reader.adam_step(name))
        all_stored: list[Stored] = ["fp32"]
        if adam_step > 0:
            all_stored += moments_of(optimizer_named(schedule.optimizer), name, parameter)
        values: dict[Stored, Tensor] = {}
        for stored in all_stored:
            values[stored] = reader.read_span(
                name, stored, tp.rank, tp.size, (first, first + length)
            )
        frozen_in_stage[name] = ParameterFrozenInStage(first, values, adam_step)
    return frozen_in_stage


def _parameters_frozen_in_stage(model: CausalDecoder) -> list[tuple[str, nn.Parameter]]:
    parameters = dict(model.named_parameters())
    return [(name, parameters[name]) for name in model.frozen_in_stage]


def _read_rows(
    reader: CheckpointReader, name: str, parameter: nn.Parameter, tp: TensorParallel, rows: Rows
) -> Tensor:
    """Rows of this rank's shard of the weights that a checkpoint holds."""
    shape = local_shape(full_shape_of(parameter), partition_of(parameter), tp.size)
    row_size = prod(shape[1:])
    span = (rows[0] * row_size, rows[1] * row_size)
    return reader.read_span(name, "fp32", tp.rank, tp.size, span).view(-1, *shape[1:])


def _own_part(parameter: nn.Parameter, groups: ProcessGroups) -> tuple[int, int]:
    """The first element and the number of those that this data-parallel rank keeps."""
    partition = zero_partition_of(parameter)
    if partition is not None:
        return partition.first, partition.length
    size = prod(
        local_shape(full_shape_of(parameter), partition_of(parameter), groups.layout.tp_size)
    )
    # Equal parts, of which the last ones may be shorter, or empty.
    at_most = -(-size // groups.layout.dp_size)
    first = min(size, at_most * groups.get_data_parallel_rank())
    return first, min(at_most, size - first)
