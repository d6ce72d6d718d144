"""Products that a GPU computes in fp8: their rounding, and that tokens do not affect each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from benchmarks.gpu.setting import CheckRow, Setting, largest_error
from pipeline.config.base import Fp8Scaling, GradientPrecision
from pipeline.parallel.quantized import Quantization, computes_in_fp8, frozen_product

_TOKENS = 64
_ROWS = 512
_COLUMNS = 1024
_TOLERANCE = 1e-2


def check_rounding(setting: Setting) -> Iterator[CheckRow]:
    """Products and gradients against those of a CPU, which rounds alike; and that a token's product
    is the same whatever stands beside it."""
    if not computes_in_fp8(setting.device_type):
        found = "this torch computes none on this device: matrices are decoded"
        yield CheckRow("products in fp8", None, found)
        return
    x = torch.randn(_TOKENS, _COLUMNS, dtype=torch.bfloat16)
    of_y = torch.randn(_TOKENS, _ROWS, dtype=torch.bfloat16)
    weight = torch.randn(_ROWS, _COLUMNS)
    for scaling, gradient in product(get_args(Fp8Scaling), get_args(GradientPrecision)):
        # The CPU is among the devices that compute in fp8, so that it rounds as the GPU does.
        devices = ("cpu", setting.device_type)
        quantization = Quantization("fp8", _ROWS, _COLUMNS, scaling, gradient, devices)
        stored = torch.empty(quantization.size, dtype=torch.uint8)
        quantization.write(stored, weight)
        name = f"a product in fp8, one scale a {scaling}, gradients in {gradient}"

        y_cpu, of_x_cpu = _with_gradient(x, stored, quantization, of_y)
        on_device = (x.to(setting.device), stored.to(setting.device))
        y, of_x = _with_gradient(*on_device, quantization, of_y.to(setting.device))
        error = _relative_error(y.cpu(), y_cpu)
        of_gradient = _relative_error(of_x.cpu(), of_x_cpu)
        yield CheckRow(
            f"{name}: against a CPU's",
            largest_error([error, of_gradient]) < _TOLERANCE,
            f"off by {error:.1e}, its gradient by {of_gradient:.1e}",
        )

        # With one scale for all tokens the outlier would make all others coarser, and what a base
        # says about one text would depend on the texts beside it.
        with_outlier = x.clone()
        with_outlier[0] *= 1e3
        alone = frozen_product(*on_device, quantization)
        beside = frozen_product(with_outlier.to(setting.device), on_device[1], quantization)
        is_equal = torch.equal(alone[1:], beside[1:])
        yield CheckRow(
            f"{name}: tokens beside an outlier",
            is_equal,
            "bit-equal" if is_equal else "differ",
        )


def _with_gradient(
    x: Tensor, stored: Tensor, quantization: Quantization, of_y: Tensor
) -> tuple[Tensor, Tensor]:
    """The product of x [tokens, columns] and its gradient for x, both in fp32."""
    x = x.detach().requires_grad_()
    # The caller may have turned gradients off.
    with torch.enable_grad():
        y = frozen_product(x, stored, quantization)
        (of_x,) = torch.autograd.grad(y, x, of_y)
    return y.detach().float(), of_x.float()


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """The size of the difference over that of `expected`."""
    return float((found - expected).norm() / expected.norm())
