"""The parameters of a run's model, counted by what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pipeline.config.run import RunConfig
from pipeline.methods.registry import training_method
from pipeline.model.bases import kind_of
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.spec import DecoderSpec
from pipeline.optimizers.optimizer import Optimizer, moments_of, optimizer_named
from pipeline.parallel.parameters import named_trained_parameters
from pipeline.parallel.topology import SINGLE


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the unsharded model; tied parameters count once.

    Attributes:
        base: parameters of the base.
        expansion: parameters that the method adds.
        trained: parameters that train.
        active: parameters of the base that compute a token, without the experts of a mixture that
            the token does not take.
        moments: what the optimizer stores of those that train: elements of all their moments.
        in_matrices: the trained parameters of an optimizer that puts whole matrices together, as
            Muon does.
    """

    base: int
    expansion: int
    trained: int
    active: int
    moments: int
    in_matrices: int = 0

    @property
    def total(self) -> int:
        """All parameters of the model."""
        return self.base + self.expansion

    @property
    def values(self) -> dict[str, int]:
        """The counts, for programs (docs/json.md)."""
        return {
            "base": self.base,
            "expansion": self.expansion,
            "trained": self.trained,
            "active": self.active,
            "by_muon": self.in_matrices,
        }

    def __str__(self) -> str:
        active = ""
        if self.active != self.base:
            active = f" ({self.active:,} active)"
        share = self.trained / self.total
        return (
            f"base {self.base:,}{active}, expansion {self.expansion:,}, "
            f"trained {self.trained:,} ({share:.1%})"
        )


def count_parameters(model: CausalDecoder, base: nn.Module, optimizer: Optimizer) -> Parameters:
    """Counts the parameters of a model.

    Args:
        model: the unsharded model, perhaps on the meta device.
        base: the base from which the method made it, likewise.
        optimizer: the run's.
    """
    pretrained = sum(parameter.numel() for parameter in base.parameters())
    total = 0
    trained = 0
    for parameter in model.parameters():
        total += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()

    idle = kind_of(model.spec).idle_parameters(model.spec, base)
    moments = 0
    in_matrices = 0
    for name, weight in named_trained_parameters(model):
        moments += weight.numel() * len(moments_of(optimizer, name, weight))
        if optimizer.needs_shards and optimizer.updates(name, weight):
            in_matrices += weight.numel()
    return Parameters(
        base=pretrained,
        expansion=total - pretrained,
        trained=trained,
        active=pretrained - idle,
        moments=moments,
        in_matrices=in_matrices,
    )


def parameters_of(config: RunConfig, spec: DecoderSpec) -> Parameters:
    """The parameters of a run's model, which is built on the meta device."""
    with torch.device("meta"):
        model = training_method(config).build(spec, SINGLE, "none")
        base = kind_of(spec).base_alone(model)
        return count_parameters(model, base, optimizer_named(config.schedule.optimizer))
