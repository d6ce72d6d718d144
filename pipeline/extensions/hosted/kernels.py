"""Packages with fast kernels that a hosted base would use and that are not installed.

transformers' recurrent mixers call functions that fall back to PyTorch where a package is missing,
several times slower, and say so in a warning that jobs do not show. Which functions a base calls is
found in the code of its modules' classes.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.transformers_model import build_base

_DISTRIBUTIONS = {
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
}
"""Under which name a package that is imported so is installed. `mamba_ssm` is not advised: its
kernels read the weights of linear maps without calling them, which open weights need.
"""


@cache
def missing_kernels(spec: HostedSpec) -> tuple[str, ...]:
    """The distributions, in order, that would speed up this base and are not installed."""
    with torch.device("meta"):
        base = build_base(spec)
    missing: set[str] = set()
    for module_class in {type(module) for module in base.modules()}:
        for package in _packages_of(module_class):
            if package in _DISTRIBUTIONS and importlib.util.find_spec(package) is None:
                missing.add(_DISTRIBUTIONS[package])
    return tuple(sorted(missing))


def describe_missing_kernels(spec: HostedSpec) -> str | None:
    """What the user of a base should install, as a line; None: nothing."""
    missing = missing_kernels(spec)
    if not missing:
        return None
    return (
        f"{', '.join(missing)} not installed: transformers computes recurrent layers of "
        f"{spec.structure.model_class} in PyTorch, several times slower; on a GPU, run: "
        "pip install 'scale-cpt[kernels]'"
    )


def _packages_of(module_class: type[nn.Module]) -> Iterator[str]:
    """The packages whose functions the code of a class of transformers calls, if they are there."""
    file = sys.modules.get(module_class.__module__)
    if file is None or not module_class.__module__.startswith("transformers."):
        return
    code = inspect.getsource(module_class)
    for name, function in vars(file).items():
        if not inspect.isfunction(function) or name not in code:
            continue
        # `use_kernel_func_from_hub_with_fallback` keeps the package and PyTorch's version.
        kept = inspect.getclosurevars(function).nonlocals
        if "torch_function" in kept and isinstance(kept.get("package"), str):
            yield kept["package"]
