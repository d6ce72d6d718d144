"""The peak memory of one GPU, by kind.

The peak is in the backward pass of a step's last micro-batch, when gradients, activations and
temporary tensors exist together. The optimizer's update comes after the activations are freed; its
copies count where they are larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.optimizers.divided_matrices import BUCKET_ELEMENTS
from pipeline.optimizers.optimizer import ADAMW_MOMENTS
from pipeline.sizing.micro_batch import MicroBatchCosts, ParameterUse, total_elements
from pipeline.sizing.traffic import estimate_gathering, partition_size
from pipeline.sizing.training_state import MASTER, MOMENT

# An optimizer of whole matrices is taken to need what Muon does.
_MESSAGE = 2
"""Bytes of an element in Muon's messages: the update in bf16."""
_ITERATED = 10
"""Bytes of an element that a rank orthogonalises: the matrix, and what an iteration holds in bf16,
the normalised matrix, its Gram matrix, their polynomial, and the result."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        weights: parameters, or this rank's partition of them, in the dtype of matrix products.
        gradients: gradients of the trained parameters, accumulated over micro-batches.
        optimizer: fp32 master weights and moments of the trained parameters.
        activations: what autograd has saved of a micro-batch when the loss begins.
        loss: a chunk of logits, and the gradients that the loss computes in the forward pass.
        gathered: the parameters that ZeRO-3 holds gathered.
        temporary: tensors of the backward pass and gradient buckets, or copies of the update.
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
        return sum(getattr(self, kind.name) for kind in fields(self))


def estimate_memory(
    costs: MicroBatchCosts, zero: DeepSpeedConfig, dp_size: int, *, asynchronous: bool = False
) -> tuple[Memory, int]:
    """The memory of a GPU, and the bytes in the host's memory for each GPU.

    The host holds what is offloaded. It also holds copies: an `asynchronous` save copies the
    optimizer's state, and at the start ZeRO-1 and 2 copy the trained parameters there and flatten
    them.
    """
    weights = weight_bytes(costs, zero, dp_size)
    gradients = gradient_bytes(costs, zero, dp_size)
    optimizer = optimizer_bytes(costs, zero, dp_size)
    update = update_bytes(costs, zero, dp_size)

    on_host = optimizer if asynchronous else 0
    if zero.offloads("optimizer"):
        # The update runs on the CPU, which needs the gradients there.
        on_host += optimizer + gradients
        gradients = optimizer = update = 0
    if zero.offloads("param"):
        kept_whole = total_elements(one for one in costs.parameters if one.kept_whole)
        on_device = kept_whole * zero.dtype.itemsize
        on_host += weights - on_device
        weights = on_device
    at_start = 0
    if zero.zero_stage < 3:
        # DeepSpeed's ZeRO-1 and 2 flatten a group's parameters on the host before they move the
        # flat tensor to the GPU: twice the parameters, their copies and the flat tensor.
        at_start = 2 * total_elements(costs.trained) * zero.dtype.itemsize

    # ZeRO-2 allocates its buckets when the backward pass begins: they do not exist during the loss.
    # ZeRO-3 keeps its buckets over the whole step.
    buckets = bucket_bytes(zero)
    backward = costs.temporary_bytes + buckets
    if zero.zero_stage == 2:
        beyond_loss = costs.backward_bytes + buckets - costs.loss_bytes
        backward = max(costs.temporary_bytes, beyond_loss)
    # At the update, activations and logits are freed, and PyTorch's allocator gives their memory to
    # the update's copies. Only what the copies need beyond it counts.
    beyond_activations = update - costs.activation_bytes - costs.loss_bytes
    memory = Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=costs.activation_bytes,
        loss=costs.loss_bytes,
        gathered=estimate_gathering(costs, zero).most_at_once * zero.dtype.itemsize,
        temporary=max(backward, beyond_activations),
    )
    return memory, max(on_host, at_start)


def weight_bytes(costs: MicroBatchCosts, zero: DeepSpeedConfig, dp_size: int) -> int:
    """The parameters of the model, as one rank stores them."""
    if zero.zero_stage < 3:
        return costs.parameter_bytes
    threshold = zero.elements("stage3_param_persistence_threshold")
    elements = 0
    for parameter in costs.parameters:
        if parameter.kept_whole:
            elements += parameter.size
            continue
        elements += partition_size(parameter.size, dp_size)
        if parameter.size <= threshold:
            # ZeRO-3 never releases small parameters: a rank has them whole, beside its partition.
            elements += parameter.size
    return elements * zero.dtype.itemsize


def gradient_bytes(costs: MicroBatchCosts, zero: DeepSpeedConfig, dp_size: int) -> int:
    """The gradients that live from the backward pass to the optimizer's step."""
    if zero.zero_stage > 1:
        elements = partitioned_elements(costs.trained, zero, dp_size)
        return elements * zero.accumulation_dtype.itemsize
    size = total_elements(costs.trained) * zero.accumulation_dtype.itemsize
    if _has_16_bit_copies(zero):
        size += total_elements(costs.trained) * zero.dtype.itemsize
    return size


def optimizer_bytes(costs: MicroBatchCosts, zero: DeepSpeedConfig, dp_size: int) -> int:
    """The fp32 master weights and the moments of a rank's partition of what trains."""
    most = len(ADAMW_MOMENTS)
    elements = partitioned_elements(costs.trained, zero, dp_size)
    size = elements * (MASTER + most * MOMENT)
    for count in range(most):
        fewer = [parameter for parameter in costs.trained if parameter.moments == count]
        size -= partitioned_elements(fewer, zero, dp_size) * (most - count) * MOMENT
    return size


def update_bytes(costs: MicroBatchCosts, zero: DeepSpeedConfig, dp_size: int) -> int:
    """The copies that the optimizer makes in its update."""
    if zero.zero_stage == 1 and _has_16_bit_copies(zero):
        # ZeRO-1 may send all gradients at once, in the dtype of communication.
        size = total_elements(costs.trained) * zero.communication_dtype.itemsize
    else:
        # Others copy their own partition of the gradients to fp32.
        size = partitioned_elements(costs.trained, zero, dp_size) * torch.float32.itemsize
    return size + _matrix_bytes(costs, zero, dp_size)


def _matrix_bytes(costs: MicroBatchCosts, zero: DeepSpeedConfig, dp_size: int) -> int:
    """Muon's update of a rank's partition, and the matrices that the rank owns of a bucket."""
    held = partitioned_elements(costs.in_matrices, zero, dp_size)
    # The update exists beside gradient and momentum, see `Muon._update`, and as it is sent.
    size = held * (MOMENT + _MESSAGE)
    # A rank owns about as many elements as it holds, but whole matrices.
    owned = min(held, BUCKET_ELEMENTS)
    for parameter in costs.in_matrices:
        owned = max(owned, parameter.matrix_size)
    return size + owned * _ITERATED


def bucket_bytes(zero: DeepSpeedConfig) -> int:
    """The buckets of gradients that wait to be sent; DeepSpeed allocates them whole."""
    if zero.zero_stage == 1:
        return 0
    bucket = zero.elements("reduce_bucket_size")
    if zero.zero_stage == 3:
        return bucket * zero.communication_dtype.itemsize
    # With overlap_comm ZeRO-2 fills one bucket while it sends the other.
    buckets = 2 if zero.overlaps else 1
    return bucket * buckets * zero.dtype.itemsize


def partitioned_elements(
    parameters: Iterable[ParameterUse], zero: DeepSpeedConfig, dp_size: int
) -> int:
    """The number of elements of `parameters` in one rank's partition."""
    if zero.zero_stage < 3:
        # ZeRO-1 and 2 lay all parameters in a row and partition the row.
        return partition_size(total_elements(parameters), dp_size)
    return sum(partition_size(parameter.size, dp_size) for parameter in parameters)


def _has_16_bit_copies(zero: DeepSpeedConfig) -> bool:
    """Whether ZeRO-1 keeps 16-bit gradients beside their fp32 sums (DeepSpeed's BF16_Optimizer)."""
    return zero.dtype != zero.accumulation_dtype
