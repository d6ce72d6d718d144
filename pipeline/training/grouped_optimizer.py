"""The optimizer of a run's trained parameters, as ZeRO takes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pipeline.config.schedule import Schedule
from pipeline.methods.parameter_groups import trained_groups
from pipeline.optimizers.adamw import ADAMW
from pipeline.optimizers.optimizer import Optimizer, optimizer_named
from pipeline.parallel.parameters import named_trained_parameters


def make_optimizer(
    model: nn.Module,
    schedule: Schedule,
    *,
    frozen_in_stage: Iterable[str] = (),
    trained_before: Sequence[Sequence[str]] = (),
) -> torch.optim.AdamW:
    """The optimizer of the trained parameters alone, in the groups of `schedule`.

    A group holds its parameters' names too: ZeRO-1 and 2 replace the parameters by one flat tensor.
    For `frozen_in_stage` and `trained_before` see `trained_groups`.

    Raises:
        ConfigError: a factor of the schedule is for parameters that are not there.
    """
    trained = dict(named_trained_parameters(model))
    chosen: Optimizer = ADAMW
    groups: list[dict[str, Any]] = []
    for group in trained_groups(
        model, schedule, frozen_in_stage=frozen_in_stage, trained_before=trained_before
    ):
        # Where a stage trains nothing that the run's optimizer updates, AdamW is all of it.
        if group.optimizer == schedule.optimizer:
            chosen = optimizer_named(schedule.optimizer)
        groups.append(
            {
                "params": [trained[name] for name in group.names],
                "names": group.names,
                "learning_rate_factor": group.learning_rate_factor,
                "weight_decay": group.weight_decay,
                "optimizer": group.optimizer,
            }
        )
    return chosen.make(groups, schedule)
