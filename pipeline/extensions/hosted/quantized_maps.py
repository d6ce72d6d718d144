"""Linear maps of a hosted base that are stored in 8 or 4 bits.

The modules stay transformers' own, with their names, classes and hooks; what is replaced is their
weight, by the bytes of `pipeline.parallel.quantized`, and their product. These are the maps that
take every token (`find_linear_maps` of `discovery.maps_and_norms`), because the base's code reads
their weights by calling them alone. Experts, routers, embedding, norms and output map stay as they
are.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.errors import BaseModelError
from pipeline.extensions.hosted.decoder import HostedDecoder
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.transformers_model import build_base
from pipeline.parallel.parameters import quantization_of
from pipeline.parallel.quantized import (
    Fp8Recipe,
    QuantizedPrecision,
    frozen_product,
    stored_parameter,
)


def quantize_maps(model: HostedDecoder, precision: QuantizedPrecision, recipe: Fp8Recipe) -> None:
    """Has the base's linear maps stored in `precision`; in fp8 as `recipe` says.

    Their values are unset: `load_base` writes them.
    """
    for name, module in _linear_maps(model.spec, model.base).items():
        weight = as_matrix(module, module.get_parameter("weight"))
        matrix: Any = nn.Parameter(weight, requires_grad=False)
        matrix.tensor_model_parallel = False
        stored = stored_parameter(matrix, precision, name, 1, recipe)
        module.register_parameter("weight", stored)
        # Of this one module: its class is transformers', and other modules share it.
        module.forward = partial(_product, name, module)


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """A linear map's weight as [out, in]; GPT-2's are stored [in, out]."""
    return weight.detach().T if isinstance(module, Conv1D) else weight.detach()


def quantized_share(spec: HostedSpec) -> float:
    """The share of the base's parameters that are matrices of these linear maps."""
    with torch.device("meta"):
        base = build_base(spec)
    matrices = 0
    for module in _linear_maps(spec, base).values():
        matrices += prod(module.get_parameter("weight").shape)
    return matrices / sum(parameter.numel() for parameter in base.parameters())


def _linear_maps(spec: HostedSpec, base: nn.Module) -> dict[str, nn.Module]:
    """The linear maps that take every token, by their names in the base."""
    maps: dict[str, nn.Module] = {}
    for layer in spec.structure.layers:
        for name in layer.linear_maps:
            full_name = f"{spec.structure.layer_name(layer)}.{name}"
            maps[full_name] = base.get_submodule(full_name)
    return maps


def _product(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """`W x + b`: [..., in] -> [..., out]."""
    if not x.is_floating_point():
        raise BaseModelError(
            f"base_precision: the base's code takes the type of {name}'s weight, which is stored "
            "in bytes, for that of its input; remove base_precision"
        )
    stored = module.get_parameter("weight")
    quantization = quantization_of(stored)
    assert quantization is not None, "quantize_maps has replaced it"
    bias: Any = module.bias
    return frozen_product(x, stored, quantization, bias)
