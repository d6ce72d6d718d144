"""Muon for the trained matrices of the layers, AdamW for the rest, as one optimizer for ZeRO.

Muon (Jordan et al. 2024) moves a matrix by its orthogonalised momentum. No part of a matrix can be
orthogonalised alone. A rank keeps the momentum of the elements that ZeRO and tensor parallelism
leave it. For the update the ranks put every matrix together, and each rank that holds a part of it
orthogonalises the whole: the result is the same in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint.rank_files import Kind
from pipeline.config.schedule import Schedule
from pipeline.methods.parameter_groups import trained_groups
from pipeline.model.decoder import is_layer_matrix
from pipeline.parallel.sharding import (
    OptimizerShard,
    full_shape_of,
    local_shape,
    merge,
    named_trained_parameters,
    partition_of,
    split,
)
from pipeline.parallel.topology import ProcessGroups

_MOMENTUM = 0.95
_ITERATIONS = 5
# Jordan et al. 2024. With these, singular values do not converge to 1, but reach a range around it
# in few iterations, which trains as well.
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-7
_RMS = 0.2
"""The root mean square of an update, as a multiple of the learning rate.

AdamW's updates have about the same, so that one learning rate serves both (Liu et al. 2025, "Muon
is scalable for LLM training").
"""


def make_optimizer(
    model: nn.Module,
    schedule: Schedule,
    *,
    resting: Iterable[str] = (),
    trained_before: Sequence[Sequence[str]] = (),
) -> torch.optim.AdamW:
    """The optimizer of the trained parameters alone, in the groups of `schedule`.

    A group holds its parameters' names too: ZeRO-1 and 2 replace the parameters by one flat tensor.
    For `resting` and `trained_before` see `parameter_groups`.

    Raises:
        ConfigError: a factor of the schedule is for parameters that are not there.
    """
    trained = dict(named_trained_parameters(model))
    groups: list[dict[str, Any]] = []
    has_muon = False
    groups_of_stage = trained_groups(
        model, schedule, resting=resting, trained_before=trained_before
    )
    for group in groups_of_stage:
        has_muon = has_muon or group.by_muon
        groups.append(
            {
                "params": [trained[name] for name in group.names],
                "names": group.names,
                "learning_rate_factor": group.learning_rate_factor,
                "weight_decay": group.weight_decay,
                "muon": group.by_muon,
            }
        )
    kind = Muon if has_muon else torch.optim.AdamW
    return kind(groups, lr=schedule.learning_rate, betas=schedule.betas, fused=True)


def moments_of(
    optimizer: torch.optim.Optimizer, name: str, parameter: nn.Parameter
) -> tuple[Kind, ...]:
    """The moments that the optimizer holds of a parameter.

    Muon's momentum has the name of AdamW's first moment.
    """
    # By class, not by setting: where a stage trains none of Muon's matrices, AdamW is all of it.
    if isinstance(optimizer, Muon) and is_layer_matrix(name, parameter):
        return ("exp_avg",)
    return ("exp_avg", "exp_avg_sq")


class Muon(torch.optim.AdamW):
    """AdamW, but for the groups marked `muon`. Every rank must call `step`, after `attach`."""

    def attach(self, shards: Iterable[OptimizerShard], groups: ProcessGroups) -> None:
        """Tells what this rank holds of each of Muon's matrices, perhaps nothing.

        The order of the matrices must be the same on every rank, because `step` gathers them.
        """
        self._shards = list(shards)
        self._ranks = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters of the groups as they are now: ZeRO sets them one by one."""
        all_groups = self.param_groups
        adamw_groups = []
        for group in all_groups:
            if not group["muon"]:
                adamw_groups.append(group)
                continue
            for flat in group["params"]:
                self._update(flat, group)
        try:
            self.param_groups = adamw_groups
            return super().step(closure)
        finally:
            self.param_groups = all_groups

    def _update(self, flat: Tensor, group: dict[str, Any]) -> None:
        """Updates the elements of `flat`, in which ZeRO holds this rank's parts of the matrices."""
        gradient = flat.grad
        assert gradient is not None
        state = self.state[flat]
        if not state:
            # Muon has no bias correction and needs no count; checkpoints have one step count for
            # all parameters.
            state["step"] = torch.zeros((), device=flat.device)
            state["exp_avg"] = torch.zeros_like(flat)
        state["step"] += 1
        momentum = state["exp_avg"].lerp_(gradient, 1 - _MOMENTUM)
        update = gradient.lerp(momentum, _MOMENTUM)  # Nesterov's momentum
        # Decoupled, as AdamW's (Loshchilov & Hutter 2019): not scaled by `_RMS`, so one weight
        # decay serves both optimizers.
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        for shard in self._shards:
            if shard.flat is flat:
                self._update_matrix(shard, update, group["lr"])

    def _update_matrix(self, shard: OptimizerShard, update: Tensor, learning_rate: float) -> None:
        # Also where this rank holds nothing of the matrix: the gathering is a collective.
        whole = self._put_together(shard, update)
        if not shard.length:
            return
        direction = orthogonalised(whole)
        # The elements of U V^T have a root mean square of 1/sqrt(max(out, in)).
        rate = learning_rate * _RMS * math.sqrt(max(whole.shape[-2:]))
        tp = self._ranks.tensor_parallel
        # Each rank orthogonalises the whole matrix and keeps its part. Sharing the matrices out
        # over the ranks would save time, and take another collective for each of them.
        own_shard = split(direction, partition_of(shard.parameter), tp.rank, tp.size).flatten()
        own_part = own_shard[shard.first : shard.first + shard.length]
        shard.within(shard.flat).add_(own_part, alpha=-rate)

    def _put_together(self, shard: OptimizerShard, update: Tensor) -> Tensor:
        """The whole matrix of which the ranks hold parts in `update`; all ranks must call it."""
        shape = full_shape_of(shard.parameter)
        partition = partition_of(shard.parameter)
        tp = self._ranks.tensor_parallel
        local = local_shape(shape, partition, tp.size)
        # In fp32: the sums are of one rank's value and zeros, and so exact; 16 bits would round the
        # update before it is orthogonalised.
        flat = update.new_zeros(math.prod(local))
        flat[shard.first : shard.first + shard.length] = shard.within(update)
        if self._ranks.layout.dp_size > 1:
            # Exact in any order of ranks: each element is on one of them, and the others add zeros.
            dist.all_reduce(flat, group=self._ranks.get_data_parallel_group())
        if tp.size == 1 or partition.dim is None:
            return flat.view(local)
        parts = flat.new_empty(tp.size, *local)
        dist.all_gather_into_tensor(parts.flatten(), flat, group=tp.group)
        return merge(parts.unbind(), partition, shape[partition.dim])


def orthogonalised(matrices: Tensor) -> Tensor:
    """About U Vᵀ of the singular value decomposition U S Vᵀ of each of `matrices` [..., out, in].

    Zeros give zeros. It is computed as in torch.optim.Muon, which takes single matrices only: by
    Newton-Schulz iterations, in bf16. A CPU, which is slow in bf16, takes fp32.
    """
    a, b, c = _COEFFICIENTS
    dtype = torch.bfloat16
    if matrices.device.type == "cpu":
        dtype = torch.float32
    # The Gram matrix x xᵀ is smaller where x is wide.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    shape = wide.shape
    x = wide.to(dtype).reshape(-1, *shape[-2:])
    # Newton-Schulz converges for singular values up to about 1, and the Frobenius norm bounds the
    # largest one.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        # x <- a x + (b G + c G²) x
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT if is_tall else x
