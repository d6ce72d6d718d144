"""What an optimizer of a run is: which parameters it updates, what it stores, and how it is made.

AdamW updates the parameters that the run's optimizer leaves to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline.config.schedule import Schedule, offered_optimizers
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import ConfigError, ExtensionError
from pipeline.extension import load_named
from pipeline.parallel.parameters import OptimizerShard
from pipeline.parallel.topology import ProcessGroups

Moment = Literal["exp_avg", "exp_avg_sq"]
"""The names of what an optimizer stores of each element, in its state and in checkpoints."""
ADAMW_MOMENTS: tuple[Moment, ...] = ("exp_avg", "exp_avg_sq")


class Optimizer(ABC):
    """An optimizer that a run may choose as `schedule.optimizer`.

    Attributes:
        name: its name in the configuration.
        moments: what it stores, in fp32, of each element that it updates: nothing, `exp_avg`, or
            `exp_avg` and `exp_avg_sq`, which are names in its state too. Its state has no others
            but `step`, a count.
        needs_shards: whether a step needs to know which elements each rank holds; `attach` tells.
            Estimates then count the memory and the messages of whole matrices, as Muon's.
    """

    name: str
    moments: tuple[Moment, ...]
    needs_shards: bool = False

    @abstractmethod
    def updates(self, name: str, parameter: Tensor) -> bool:
        """Whether it updates the trained parameter of that name; AdamW updates all others.

        ZeRO may hold a part of it: its shape is `full_shape_of(parameter)`.
        """

    @abstractmethod
    def make(self, groups: list[dict[str, Any]], schedule: Schedule) -> torch.optim.AdamW:
        """torch's optimizer of the parameters in `groups`, those that AdamW updates included.

        A group's entry `optimizer` is the name of the one that updates it. A step multiplies by its
        entry `lr`, and decays by its `weight_decay`.
        """

    def attach(  # noqa: B027  # most need nothing
        self,
        made: torch.optim.Optimizer,
        shards: Sequence[OptimizerShard],
        groups: ProcessGroups,
    ) -> None:
        """Tells what `make` made what this rank holds of each parameter that this one updates.

        All ranks call it together, with the same parameters in the same order, after ZeRO has
        divided them.
        """

    def unsupported_setting(self, deepspeed: DeepSpeedConfig) -> tuple[str, str] | None:
        """A setting of `zero_optimization` that it does not work with, and why; None if there is
        none."""
        return None


def moments_of(optimizer: Optimizer, name: str, parameter: nn.Parameter) -> tuple[Moment, ...]:
    """What is stored of each element of a trained parameter."""
    if optimizer.updates(name, parameter):
        return optimizer.moments
    return ADAMW_MOMENTS


@cache
def optimizer_named(name: str) -> Optimizer:
    """The optimizer that `schedule.optimizer` names.

    Raises:
        ExtensionError: an extension offers something else under that name.
    """
    place = offered_optimizers()[name]
    optimizer: Optimizer = load_named(place, Optimizer, name)
    # A checkpoint stores the moments of a parameter one after the other: their places, of which a
    # reader knows no other than AdamW's, are their names.
    moments = getattr(optimizer, "moments", None)
    if moments not in [ADAMW_MOMENTS[:count] for count in range(len(ADAMW_MOMENTS) + 1)]:
        raise ExtensionError(
            f"{place}: moments: expected (), {ADAMW_MOMENTS[:1]} or {ADAMW_MOMENTS}, in this "
            f"order, found {moments!r}; call the first that it stores exp_avg"
        )
    return optimizer


def check_optimizer(schedule: Schedule, deepspeed: DeepSpeedConfig) -> None:
    """Checks that the run's optimizer works with its DeepSpeed file.

    Raises:
        ConfigError: it does not.
    """
    unsupported = optimizer_named(schedule.optimizer).unsupported_setting(deepspeed)
    if unsupported is None:
        return
    setting, reason = unsupported
    raise ConfigError(
        f"schedule.optimizer: expected adamw, found {schedule.optimizer} with "
        f"zero_optimization.{setting} in {deepspeed.path}, {reason}; name another deepspeed file, "
        "or remove the setting"
    )
