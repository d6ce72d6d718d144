"""How a norm runs with changed gains, and how modules are held by names with dots.

Training on hosted bases imports this file too. It needs torch alone, and imports nothing of this
project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class WithoutHooks(nn.Module):
    """The code of a module without its hooks, from one of which it is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.forward(*arguments)


def call_with_own_gain(norm: nn.Module, own: nn.Module, arguments: tuple[Any, ...]) -> Tensor:
    """What `norm` gives with the parameters of `own` added to its gain and bias, by their names."""
    changed: dict[str, Tensor] = {}
    for name, difference in own.named_parameters():
        changed[f"module.{name}"] = norm.get_parameter(name) + difference
    normed: Tensor = functional_call(WithoutHooks(norm), changed, arguments)
    return normed


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
