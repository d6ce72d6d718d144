"""How many parameters a run has, and how many of them each rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import nn

from pipeline.model.decoder import Decoder
from pipeline.parallel.parameter import full_shape_of


@dataclass(frozen=True)
class Parameters:
    """Elements of the whole model, tied ones counted once: the base's, those added to it, and those that train."""

    base: int
    expansion: int
    trained: int

    @property
    def total(self) -> int:
        """Everything that is in the model."""
        return self.base + self.expansion


def count_parameters(model: Decoder, base: Decoder) -> Parameters:
    """Counts `model`, which a method made of `base`; either may be a model without data, and a rank's shard."""
    pretrained = _elements(base.parameters())
    return Parameters(pretrained, _elements(model.parameters()) - pretrained, count_trained(model))


def count_trained(model: Decoder) -> int:
    """The elements of `model` that train."""
    return _elements(parameter for parameter in model.parameters() if parameter.requires_grad)


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(prod(full_shape_of(parameter)) for parameter in parameters)
