"""The peak memory of one GPU, by kind, and the disk space of checkpoints.

The peak is in the backward pass of a step's last micro-batch. The optimizer's update comes after the activations are
freed; its copies count where they are larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import PreflightError
from pipeline.model.decoder import Decoder, is_layer_matrix
from pipeline.parallel.linear import ExpertLinear
from pipeline.parallel.sharding import named_trained_parameters
from pipeline.sizing.micro_batch import MicroBatchCosts
from pipeline.sizing.traffic import estimate_gathering, partition_size


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the unsharded model, tied parameters counted once: of the base, of the expansion, trained.

    `active`: those of the base that compute a token, without the experts of a mixture that it does not take. `by_muon`:
    the trained ones that Muon updates.
    """

    base: int
    expansion: int
    trained: int
    active: int
    by_muon: int = 0

    @property
    def total(self) -> int:
        return self.base + self.expansion

    def __str__(self) -> str:
        share = self.trained / self.total
        active = "" if self.active == self.base else f" ({self.active:,} active)"
        return f"base {self.base:,}{active}, expansion {self.expansion:,}, trained {self.trained:,} ({share:.1%})"


def count_parameters(model: Decoder, base: Decoder, *, with_muon: bool = False) -> Parameters:
    """Counts `model`, which a method made from `base`; both whole, and perhaps without data."""
    pretrained = sum(parameter.numel() for parameter in base.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    mixture = base.spec.mixture
    experts = [
        module.weight.numel() for module in base.modules() if isinstance(module, ExpertLinear)
    ]
    idle = (
        0
        if mixture is None
        else sum(experts) * (mixture.experts - mixture.top_k) // mixture.experts
    )
    matrices = [
        weight.numel()
        for name, weight in named_trained_parameters(model)
        if is_layer_matrix(name, weight)
    ]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Parameters(
        pretrained,
        total - pretrained,
        trained,
        pretrained - idle,
        sum(matrices) if with_muon else 0,
    )


_MASTER_AND_MOMENTS = 12  # bytes of an element's fp32 master weight and two Adam moments
_MOMENT = 4  # of these a moment's; Muon has one
_PUT_TOGETHER = 16  # of an element of a matrix that is orthogonalised: shards, whole, and the iteration's in bf16


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        weights: parameters, or this rank's partition of them, in the dtype of the matrix products.
        gradients: of the trained parameters, accumulated over micro-batches.
        optimizer: fp32 master weights and the moments of the trained parameters.
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
        return sum(getattr(self, kind.name) for kind in fields(self))


def estimate_memory(
    costs: MicroBatchCosts, zero: DeepSpeedConfig, dp_size: int, *, asynchronous: bool = False
) -> tuple[Memory, int]:
    """A GPU's memory, and the bytes in the host's memory per GPU: what is offloaded, and copies of what trains.

    An `asynchronous` save holds a copy of the optimizer's state. At the start, ZeRO-1 and 2 gather the trained
    parameters on the host and join them there.
    """
    stage, itemsize, sent = zero.zero_stage, zero.dtype.itemsize, zero.communication_dtype.itemsize

    def held(sizes: list[int]) -> int:
        """A rank's elements: of each parameter (ZeRO-3), or of all in a row."""
        return sum(
            partition_size(size, dp_size) for size in (sizes if stage == 3 else [sum(sizes)])
        )

    trained = sum(parameter.size for parameter in costs.trained)
    partition = held([parameter.size for parameter in costs.trained])
    by_muon = held([parameter.size for parameter in costs.parameters if parameter.muon_size])
    weights = costs.parameter_bytes
    if stage == 3:  # small ones are there whole as well
        sizes, threshold = (
            [one.size for one in costs.parameters],
            zero.elements("stage3_param_persistence_threshold"),
        )
        weights = (held(sizes) + sum(size for size in sizes if size <= threshold)) * itemsize
    gradients = (trained if stage == 1 else partition) * zero.accumulation_dtype.itemsize
    # The copies of the optimizer's update: ZeRO-1 may send all gradients at once, the others copy their own in fp32.
    update = partition * torch.float32.itemsize
    if (
        stage == 1 and zero.dtype != zero.accumulation_dtype
    ):  # DeepSpeed's BF16_Optimizer: both kinds are whole
        gradients += trained * itemsize
        update = trained * sent
    largest_matrix = max((parameter.muon_size for parameter in costs.parameters), default=0)
    update += by_muon * _MOMENT + largest_matrix * _PUT_TOGETHER
    optimizer = partition * _MASTER_AND_MOMENTS - by_muon * _MOMENT
    on_host = optimizer if asynchronous else 0
    if zero.offloads("optimizer"):
        on_host += optimizer + gradients
        optimizer = gradients = update = 0
    if zero.offloads("param"):
        on_host, weights = on_host + weights, 0
    # Gradients that wait to be sent: DeepSpeed allocates whole buckets, however small the gradients are.
    waiting = {1: 0, 2: itemsize * (2 if zero.overlaps else 1), 3: sent}[stage]
    buckets = zero.elements("reduce_bucket_size") * waiting
    memory = Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=costs.activation_bytes,
        loss=costs.loss_bytes,
        gathered=estimate_gathering(costs, zero).most_at_once * itemsize,
        temporary=max(
            costs.temporary_bytes + buckets, update - costs.activation_bytes - costs.loss_bytes
        ),
    )
    at_start = 2 * trained * itemsize if stage < 3 else 0
    return memory, max(on_host, at_start)


def checkpoint_bytes(parameters: Parameters) -> int:
    """The size of one checkpoint: the optimizer's states, from which loading restores the trained weights.

    The base is not in it. The rest (random states, padding, names) is below a few percent in large runs.
    """
    return parameters.trained * _MASTER_AND_MOMENTS - parameters.by_muon * _MOMENT


def most_checkpoints(config: RunConfig) -> int:
    """The most on the disk at once: the last ones, those that are kept for good, and one that is being written."""
    kept = config.schedule.steps // (
        config.checkpoints.keep_every_steps or config.schedule.steps + 1
    )
    before_spike = 1 + math.ceil(config.stability.rollback_steps / config.checkpoints.every_steps)
    return max(config.checkpoints.keep_last, before_spike) + kept + 1


def checkpoints_bytes(config: RunConfig, parameters: Parameters) -> int:
    """The disk space that a run needs: the most checkpoints at once, and a tenth more."""
    return int(1.1 * checkpoint_bytes(parameters) * most_checkpoints(config))


def no_room(folder: Path, needed_bytes: int, free_bytes: int) -> PreflightError:
    """The error for a `folder` without enough disk space for the checkpoints still to be written."""
    return PreflightError(
        f"{folder}: the checkpoints need {needed_bytes / 1e9:.3g} GB more, found {free_bytes / 1e9:.3g} GB free; make "
        "room, lower checkpoints.keep_last, or set folder to another disk"
    )
