"""AdamW, by torch, for all parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.config.schedule import Schedule
from pipeline.optimizers.optimizer import ADAMW_MOMENTS, Optimizer


class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019) for every parameter that trains."""

    name = "adamw"
    moments = ADAMW_MOMENTS

    def updates(self, name: str, parameter: Tensor) -> bool:
        return True

    def make(self, groups: list[dict[str, Any]], schedule: Schedule) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            groups, lr=schedule.learning_rate, betas=schedule.betas, fused=True
        )


ADAMW = AdamW()
