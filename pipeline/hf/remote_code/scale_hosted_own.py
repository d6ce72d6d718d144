"""What tokens that a gate opens have of their own beside the weights of a hosted base.

As scale_streams.py has it beside its own maps and norms, here in forward hooks of transformers'
modules: a low-rank difference of a linear map, and a norm's own code with changed gains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .configuration_scale_hosted import HostedScaleConfig
from .scale_open_weights import ScaleLowRank
from .scale_own_calls import call_with_own_gain, nested


class HostedOwnGains(nn.Module):
    """The differences of a norm's gain and bias, by the names of the norm's parameters."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))

    def forward(self, norm: nn.Module, arguments: tuple[Any, ...]) -> Tensor:
        """What `norm` gives with its gain and bias changed."""
        return call_with_own_gain(norm, self, arguments)


def low_rank_differences(
    config: HostedScaleConfig, layer: nn.Module, names: list[str]
) -> nn.Module:
    """The low-rank differences of the linear maps `names` within a layer of the base."""
    differences: dict[str, nn.Module] = {}
    for name in names:
        linear: Any = layer.get_submodule(name)
        if isinstance(linear, nn.Linear):
            sizes = (linear.in_features, linear.out_features)
        else:
            sizes = (linear.nx, linear.nf)  # GPT-2's map, whose weights are stored [in, out]
        differences[name] = ScaleLowRank(*sizes, config.own_rank or 0, config.own_scale)
    return nested(differences)


def own_gains(base: nn.Module, names: list[str]) -> nn.Module:
    """The differences of the gains of the norms `names` within `base`."""
    return nested({name: HostedOwnGains(base.get_submodule(name)) for name in names})
