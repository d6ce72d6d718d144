"""Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675) for the matrices within layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline.config.schedule import Schedule
from pipeline.model.decoder import is_layer_matrix
from pipeline.optimizers.optimizer import Moment, Optimizer

BETA = 0.99  # of the momentum; that of the update is the first of `schedule.betas`


class Lion(Optimizer):
    name = "lion"
    moments: tuple[Moment, ...] = ("exp_avg",)

    def updates(self, name: str, parameter: Tensor) -> bool:
        # AdamW updates all others; with `return True` none is left.
        return is_layer_matrix(name, parameter)

    def make(self, groups: list[dict[str, Any]], schedule: Schedule) -> torch.optim.AdamW:
        return LionAndAdamW(groups, lr=schedule.learning_rate, betas=schedule.betas, fused=True)


class LionAndAdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        all_groups = self.param_groups
        try:
            self.param_groups = [group for group in all_groups if group["optimizer"] != LION.name]
            loss = super().step(closure)
        finally:
            self.param_groups = all_groups
        for group in all_groups:
            if group["optimizer"] != LION.name:
                continue
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:  # under the names that checkpoints know
                    state["step"] = torch.zeros((), device=weight.device)
                    state["exp_avg"] = torch.zeros_like(weight)
                state["step"] += 1
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                update = torch.lerp(weight.grad, state["exp_avg"], group["betas"][0]).sign()
                weight.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(weight.grad, 1 - BETA)
        return loss


LION = Lion()
