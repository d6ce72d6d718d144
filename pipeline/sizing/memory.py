"""The peak memory of one GPU, by kind, and the disk space of checkpoints.

The peak is in the backward pass of a step's last micro-batch. The optimizer's update comes after the activations are
freed; its copies count where they are larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import PreflightError
from pipeline.model.decoder import Decoder
from pipeline.parallel.sharding import full_shape_of
from pipeline.sizing.gathering import Gathering, GatherSettings
from pipeline.sizing.micro_batch import MicroBatchCosts


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the unsharded model, tied parameters counted once: of the base, of the expansion, trained."""

    base: int
    expansion: int
    trained: int

    @property
    def total(self) -> int:
        """All parameters of the model."""
        return self.base + self.expansion

    def __str__(self) -> str:
        share = self.trained / self.total
        return f"base {self.base:,}, expansion {self.expansion:,}, trained {self.trained:,} ({share:.1%})"


def count_parameters(model: Decoder, base: Decoder) -> Parameters:
    """Counts `model`, which a method made from `base`; both may be without data, and a rank's shard."""
    pretrained = _elements(base.parameters())
    return Parameters(pretrained, _elements(model.parameters()) - pretrained, count_trained(model))


def count_trained(model: Decoder) -> int:
    """The number of parameters of `model` that train."""
    return _elements(parameter for parameter in model.parameters() if parameter.requires_grad)


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(prod(full_shape_of(parameter)) for parameter in parameters)


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}


@dataclass(frozen=True)
class ZeroSettings:
    """The settings of a DeepSpeed JSON file that decide memory and messages, at `stage`.

    Attributes:
        dtype: of weights and matrix products.
        accumulation_dtype: of the gradients that are accumulated over micro-batches.
        communication_dtype: of the gradients in messages.
        bucket_elements: the size of a gradient bucket, in elements.
        overlaps: whether communication overlaps with computation.
        gathering: the settings of ZeRO-3's gathers.
        host_optimizer, host_weights: whether these are offloaded to the host.
    """

    stage: int
    dtype: torch.dtype
    accumulation_dtype: torch.dtype
    communication_dtype: torch.dtype
    bucket_elements: int
    overlaps: bool
    gathering: GatherSettings
    host_optimizer: bool = False
    host_weights: bool = False

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether every rank accumulates all gradients in fp32, in addition to those that autograd writes.

        DeepSpeed's BF16_Optimizer does: ZeRO-1 over 16-bit weights with fp32 accumulation.
        """
        return self.stage == 1 and self.dtype != self.accumulation_dtype


def zero_settings(config: DeepSpeedConfig, stage: int | None = None) -> ZeroSettings:
    """The settings of a JSON file, or those at another stage (then without offloading)."""
    zero = config.zero
    own = stage is None or stage == config.zero_stage
    stage = stage or config.zero_stage
    accumulation = _dtype(config.values.get("data_types", {}).get("grad_accum_dtype"), config.dtype)
    return ZeroSettings(
        stage=stage,
        dtype=config.dtype,
        accumulation_dtype=accumulation,
        communication_dtype=_dtype(config.values.get("communication_data_type"), config.dtype),
        bucket_elements=int(zero.get("reduce_bucket_size", 500_000_000)),
        overlaps=bool(zero.get("overlap_comm", stage == 3)),
        gathering=GatherSettings.of(zero),
        host_optimizer=own and _on_host(zero, "offload_optimizer"),
        host_weights=own and _on_host(zero, "offload_param"),
    )


def _on_host(zero: dict[str, Any], name: str) -> bool:
    return zero.get(name, {}).get("device", "none") != "none"


def _dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    return default if name is None else _DTYPES[name]


_FP32 = 4
_MASTER_AND_MOMENTS = 3 * _FP32
"""Bytes of an element's fp32 master weight and two Adam moments."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        weights: parameters, or this rank's partition of them, in the dtype of the matrix products.
        gradients: of the trained parameters, accumulated over micro-batches.
        optimizer: fp32 master weights and the two Adam moments of the trained parameters.
        activations: what autograd keeps of a micro-batch until the loss.
        loss: a chunk of logits, and the gradients that the loss computes in the forward pass.
        gathered: the parameters that ZeRO-3 holds gathered.
        temporary: tensors of the backward pass, and gradient buckets.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    gathered: int
    temporary: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(getattr(self, kind.name) for kind in fields(self))


def estimate_memory(
    costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int, gathering: Gathering | None, *, asynchronous: bool = False
) -> tuple[Memory, int]:
    """A GPU's memory, and the bytes in the host's memory per GPU: what is offloaded, and copies of what trains.

    An `asynchronous` save holds a copy of the optimizer's state. At the start, ZeRO-1 and 2 gather the trained
    parameters on the host and join them there.
    """
    weights = _weights_bytes(costs, zero, dp_size)
    optimizer = _partition(costs, zero, dp_size) * _MASTER_AND_MOMENTS
    gradients = _gradients_bytes(costs, zero, dp_size)
    on_host = optimizer if asynchronous else 0
    if zero.host_optimizer:
        on_host += optimizer + gradients
        optimizer = gradients = 0
    if zero.host_weights:
        on_host, weights = on_host + weights, 0
    of_loss = costs.activation_bytes + costs.loss_bytes
    of_backward = costs.temporary_bytes + _bucket_bytes(zero)
    of_update = _update_bytes(costs, zero, dp_size)
    memory = Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=costs.activation_bytes,
        loss=costs.loss_bytes,
        gathered=gathering.most_at_once * zero.dtype.itemsize if gathering else 0,
        temporary=max(of_backward, of_update - of_loss),
    )
    at_start = 2 * sum(costs.trained_sizes) * zero.dtype.itemsize if zero.stage < 3 else 0
    return memory, max(on_host, at_start)


def _weights_bytes(costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int) -> int:
    """All of this rank's shards under ZeRO-1 and 2; under ZeRO-3 a partition, and small parameters whole as well."""
    if zero.stage < 3:
        return costs.parameter_bytes
    sizes = costs.parameter_sizes
    whole = sum(size for size in sizes if size <= zero.gathering.param_persistence_threshold)
    return (sum(partition_size(size, dp_size) for size in sizes) + whole) * zero.dtype.itemsize


def _gradients_bytes(costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int) -> int:
    """ZeRO-1 holds the gradients of all trained parameters, ZeRO-2 and 3 this rank's partition."""
    trained = sum(costs.trained_sizes)
    if zero.keeps_whole_gradients:
        return trained * (zero.accumulation_dtype.itemsize + zero.dtype.itemsize)
    if zero.stage == 1:
        return trained * zero.accumulation_dtype.itemsize
    return _partition(costs, zero, dp_size) * zero.accumulation_dtype.itemsize


def partition_size(size: int, dp_size: int) -> int:
    """A rank's part of `size` elements; that of the last rank is padded."""
    return -(-size // dp_size)


def _partition(costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int) -> int:
    """How many elements this rank updates: ZeRO-3 partitions each parameter, ZeRO-1 and 2 all of them together."""
    if zero.stage == 3:
        return sum(partition_size(size, dp_size) for size in costs.trained_sizes)
    return partition_size(sum(costs.trained_sizes), dp_size)


def _bucket_bytes(zero: ZeroSettings) -> int:
    """Gradients that wait to be sent. DeepSpeed allocates whole buckets, however small the gradients are."""
    if zero.stage == 1:
        return 0
    if zero.stage == 3:
        return zero.bucket_elements * zero.communication_dtype.itemsize
    return zero.bucket_elements * zero.dtype.itemsize * (2 if zero.overlaps else 1)


def _update_bytes(costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int) -> int:
    """Copies during the optimizer's update: ZeRO-1 sends all gradients at once, 2 and 3 copy their own in fp32."""
    if zero.host_optimizer:
        return 0
    if zero.keeps_whole_gradients:
        return sum(costs.trained_sizes) * zero.communication_dtype.itemsize
    return _partition(costs, zero, dp_size) * torch.float32.itemsize


def checkpoint_bytes(parameters: Parameters) -> int:
    """The size of one checkpoint: the optimizer's states, from which loading restores the trained weights.

    The base is not in it. The rest (random states, padding, names) is below a few percent in large runs.
    """
    return parameters.trained * _MASTER_AND_MOMENTS


def most_checkpoints(config: RunConfig) -> int:
    """The most on the disk at once: the last ones, those that are kept for good, and one that is being written."""
    kept = config.schedule.steps // (config.checkpoints.keep_every_steps or config.schedule.steps + 1)
    return config.checkpoints.keep_last + kept + 1


def checkpoints_bytes(config: RunConfig, parameters: Parameters) -> int:
    """The disk space that a run needs: the most checkpoints at once, plus the margin."""
    most = checkpoint_bytes(parameters) * most_checkpoints(config)
    return int(most * (1 + config.preflight.disk_margin_fraction))


def held_bytes(folder: Path) -> int:
    """The total size of the files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def no_room(folder: Path, needed_bytes: int, free_bytes: int) -> PreflightError:
    """The error for a `folder` without enough disk space for the checkpoints still to be written."""
    return PreflightError(
        f"{folder}: the checkpoints need {needed_bytes / 1e9:.3g} GB more, found {free_bytes / 1e9:.3g} GB free; make "
        "room, lower checkpoints.keep_last, or set folder to another disk"
    )
