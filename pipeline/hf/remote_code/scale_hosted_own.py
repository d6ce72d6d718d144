"""What tokens that a gate opens have of their own beside the weights of a hosted base.

As scale_streams.py has it beside its own maps and norms, here in forward hooks of transformers'
modules: a low-rank difference of a linear map, and a norm's own code with changed gains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .configuration_scale_hosted import HostedScaleConfig
from .scale_streams import ScaleLowRank


class HostedOwnGains(nn.Module):
    """The differences of a norm's gain and bias, by the names of the norm's parameters."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))

    def forward(self, norm: nn.Module, arguments: tuple[Any, ...]) -> Tensor:
        """What `norm` gives with its gain and bias changed."""
        changed: dict[str, Tensor] = {}
        for name, own in self.named_parameters():
            changed[f"module.{name}"] = norm.get_parameter(name) + own
        normed: Tensor = functional_call(WithoutHooks(norm), changed, arguments)
        return normed


class WithoutHooks(nn.Module):
    """The code of a module without its hooks, from one of which it is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.forward(*arguments)


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


def nested(modules: Mapping[str, nn.Module]) -> nn.Module:
    """A module that holds `modules` by their names, in which dots stand for levels."""
    tree = nn.Module()
    for name, module in modules.items():
        *levels, leaf = name.split(".")
        parent = tree
        for level in levels:
            if level not in dict(parent.named_children()):
                parent.add_module(level, nn.Module())
            parent = parent.get_submodule(level)
        parent.add_module(leaf, module)
    return tree
