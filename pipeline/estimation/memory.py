"""What one GPU holds, by kind, at the moment it holds most.

Weights, gradients, optimizer states and what a pass needs are at their largest together: in the backward pass of a
step's last micro-batch. The optimizer's own step comes after the activations are gone; its copies count where they are
larger.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from pipeline.estimation.gathering import Gathering
from pipeline.estimation.micro_batch import MicroBatchCosts
from pipeline.estimation.zero import ZeroSettings

_FP32 = 4
_MASTER_AND_MOMENTS = 3 * _FP32


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        weights: parameters, or this rank's partition of them, in the dtype they are multiplied in.
        gradients: of what trains, added up over micro-batches.
        optimizer: fp32 master weights and the two Adam moments of what trains.
        activations: what autograd keeps of a micro-batch until the loss.
        loss: a chunk of logits, and the gradients that the loss computes ahead.
        gathered: ZeRO-3's gathered working set.
        temporary: the backward pass's own tensors, and gradients under way in their buckets.
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
        """All kinds together."""
        return sum(getattr(self, kind.name) for kind in fields(self))


def estimate_memory(
    costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int, gathering: Gathering | None
) -> tuple[Memory, int]:
    """A GPU's memory and, in bytes, what is kept in the host's memory instead (for each GPU)."""
    held = weights_bytes(costs, zero, dp_size)
    optimizer = _partition(costs, zero, dp_size) * _MASTER_AND_MOMENTS
    gradients = gradients_bytes(costs, zero, dp_size)
    on_host = 0
    if zero.host_optimizer:
        on_host += optimizer + gradients
        optimizer = gradients = 0
    if zero.host_weights:
        on_host, held = on_host + held, 0
    in_pass = costs.activation_bytes + costs.loss_bytes + costs.temporary_bytes + _bucket_bytes(costs, zero)
    in_step = _step_bytes(costs, zero, dp_size)
    temporary = costs.temporary_bytes + _bucket_bytes(costs, zero) + max(0, in_step - in_pass)
    memory = Memory(
        weights=held,
        gradients=gradients,
        optimizer=optimizer,
        activations=costs.activation_bytes,
        loss=costs.loss_bytes,
        gathered=gathering.most_at_once * zero.dtype.itemsize if gathering else 0,
        temporary=temporary,
    )
    return memory, on_host


def weights_bytes(costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int) -> int:
    """All of the model's shards under ZeRO-1 and 2; under ZeRO-3 a partition, and small parameters whole beside it."""
    sizes = costs.parameter_sizes
    if zero.stage < 3:
        return sum(sizes) * zero.dtype.itemsize
    whole = sum(size for size in sizes if size <= zero.gathering.param_persistence_threshold)
    return (sum(partition_size(size, dp_size) for size in sizes) + whole) * zero.dtype.itemsize


def gradients_bytes(costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int) -> int:
    """ZeRO-1 holds the gradients of all that trains, ZeRO-2 and 3 this rank's partition."""
    trained = sum(costs.trained_sizes)
    if zero.keeps_whole_gradients:
        return trained * (zero.accumulation_dtype.itemsize + zero.dtype.itemsize)
    if zero.stage == 1:
        return trained * zero.accumulation_dtype.itemsize
    return _partition(costs, zero, dp_size) * zero.accumulation_dtype.itemsize


def partition_size(size: int, dp_size: int) -> int:
    """A rank's part of `size` elements; the last one's is padded."""
    return -(-size // dp_size)


def _partition(costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int) -> int:
    """How many trained elements this rank updates: ZeRO-3 divides each parameter, the others all of them together."""
    if zero.stage == 3:
        return sum(partition_size(size, dp_size) for size in costs.trained_sizes)
    return partition_size(sum(costs.trained_sizes), dp_size)


def _bucket_bytes(costs: MicroBatchCosts, zero: ZeroSettings) -> int:
    """Gradients that wait to be sent. DeepSpeed allocates whole buckets, however few the gradients are."""
    if zero.stage == 1:
        return 0
    if zero.stage == 3:
        return zero.bucket_elements * zero.communication_dtype.itemsize
    return zero.bucket_elements * zero.dtype.itemsize * (2 if zero.overlaps else 1)


def _step_bytes(costs: MicroBatchCosts, zero: ZeroSettings, dp_size: int) -> int:
    """The copies that the optimizer's step makes: ZeRO-1 sends all gradients at once, 2 and 3 copy theirs in fp32."""
    if zero.host_optimizer:
        return 0
    if zero.keeps_whole_gradients:
        return sum(costs.trained_sizes) * zero.communication_dtype.itemsize
    return _partition(costs, zero, dp_size) * torch.float32.itemsize
