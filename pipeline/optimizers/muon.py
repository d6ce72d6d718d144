"""Muon for the trained matrices of the layers, AdamW for the rest, as one optimizer for ZeRO.

Muon (Jordan et al. 2024) moves a matrix by its orthogonalised momentum. No part of a matrix can be
orthogonalised alone. A rank keeps the momentum of the elements that ZeRO and tensor parallelism
leave it, and for the update each matrix is put together on one of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.config.schedule import Schedule
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.model.decoder import is_layer_matrix
from pipeline.optimizers.divided_matrices import DividedMatrices
from pipeline.optimizers.optimizer import Moment, Optimizer
from pipeline.parallel.parameters import OptimizerShard
from pipeline.parallel.topology import ProcessGroups

_MOMENTUM = 0.95
ITERATIONS = 5
# Jordan et al. 2024. With these, singular values do not converge to 1, but reach a range around it
# in few iterations, which trains as well.
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-7
_RMS = 0.2
"""The root mean square of an update, as a multiple of the learning rate.

AdamW's updates have about the same, so that one learning rate serves both (Liu et al. 2025, "Muon
is scalable for LLM training").
"""


class Muon(Optimizer):
    """Muon for the matrices within layers, and AdamW for every other parameter."""

    name = "muon"
    # The momentum has the name of AdamW's first moment.
    moments: tuple[Moment, ...] = ("exp_avg",)
    needs_shards = True

    def updates(self, name: str, parameter: Tensor) -> bool:
        return is_layer_matrix(name, parameter)

    def make(self, groups: list[dict[str, Any]], schedule: Schedule) -> torch.optim.AdamW:
        return MuonAndAdamW(groups, lr=schedule.learning_rate, betas=schedule.betas, fused=True)

    def attach(
        self,
        made: torch.optim.Optimizer,
        shards: Sequence[OptimizerShard],
        groups: ProcessGroups,
    ) -> None:
        assert isinstance(made, MuonAndAdamW), "made by `make`"
        made.attach(shards, groups)

    def unsupported_setting(self, deepspeed: DeepSpeedConfig) -> tuple[str, str] | None:
        reason = "where matrices cannot be put together on the GPUs"
        if deepspeed.offloads("optimizer"):
            return "offload_optimizer", reason
        if deepspeed.zero.get("mics_shard_size", 0) > 0:
            return "mics_shard_size", reason
        return None


MUON = Muon()


class MuonAndAdamW(torch.optim.AdamW):
    """AdamW, but for the groups of Muon. Every rank must call `step`, after `attach`."""

    def attach(self, shards: Sequence[OptimizerShard], groups: ProcessGroups) -> None:
        """Tells what this rank holds of each of Muon's matrices, perhaps nothing.

        It is a collective. The order of the matrices must be the same on every rank.
        """
        by_flat: dict[Tensor, list[OptimizerShard]] = {}
        for shard in shards:
            by_flat.setdefault(shard.flat, []).append(shard)
        self._matrices: dict[Tensor, DividedMatrices] = {}
        for flat, within in by_flat.items():
            self._matrices[flat] = DividedMatrices(within, groups.layout)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters of the groups as they are now: ZeRO sets them one by one."""
        all_groups = self.param_groups
        adamw_groups = []
        for group in all_groups:
            if group["optimizer"] != MUON.name:
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
        # In the type of the iteration, to which it rounds its input first: 16 bits on a GPU.
        dtype = _iteration_dtype(flat.device)
        for place, shape, direction in self._matrices[flat].map(orthogonalised, update, dtype):
            # The elements of U V^T have a root mean square of 1/sqrt(max(out, in)).
            rate = group["lr"] * _RMS * math.sqrt(max(shape))
            flat[place].add_(direction, alpha=-rate)


def _iteration_dtype(device: torch.device) -> torch.dtype:
    """The type of the Newton-Schulz iteration: bf16, but fp32 on a CPU, which is slow in bf16."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalised(matrices: Tensor) -> Tensor:
    """About U Vᵀ of the singular value decomposition U S Vᵀ of each of `matrices` [..., out, in].

    Zeros give zeros. It is computed as in torch.optim.Muon, which takes single matrices only: by
    Newton-Schulz iterations, in the type of `_iteration_dtype`.
    """
    a, b, c = _COEFFICIENTS
    dtype = _iteration_dtype(matrices.device)
    # The Gram matrix x xᵀ is smaller where x is wide.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    shape = wide.shape
    x = wide.to(dtype).reshape(-1, *shape[-2:])
    # Newton-Schulz converges for singular values up to about 1, and the Frobenius norm bounds the
    # largest one.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        # x <- a x + (b G + c G²) x
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT if is_tall else x
