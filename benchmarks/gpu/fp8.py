"""The time of a frozen product and of its input's gradient, in bf16 and in ways of fp8.

The ways are those that the project has or could have: a scale for each row of the matrix or one for
all, activations with a scale for each token or one for all, and the gradient with or without a
second, transposed copy of the codes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.setting import CheckRow, Setting
from pipeline.config.base import Fp8Scaling
from pipeline.parallel.quantized import (
    FP8,
    Quantization,
    computes_in_fp8,
    input_gradient_in_fp8,
    product_by_token,
    product_in_fp8,
)

_TOKENS = 8192
"""A row of a run, which is enough to fill a GPU."""
_SHAPES = {
    "8B attention": (4096, 4096),
    "8B gate and up": (14336, 4096),
    "8B down": (4096, 14336),
    "1B gate and up": (8192, 2048),
    "8B key and value": (1024, 4096),
}
"""Rows and columns of the matrices of Llama 3; the last is small, which runs multiply in bf16."""
_TURNS = 20


def check_fp8_products(setting: Setting) -> Iterator[CheckRow]:
    """Each product's time over that of the same in bf16; the casts of activations and gradients are
    counted."""
    if not setting.on_gpu or not computes_in_fp8(setting.device_type):
        yield CheckRow("products in fp8 beside bf16", None, "seen on a GPU with fp8 only")
        return
    for name, (rows, columns) in _SHAPES.items():
        x = torch.randn(_TOKENS, columns, device=setting.device, dtype=torch.bfloat16)
        gradient = torch.randn(_TOKENS, rows, device=setting.device, dtype=torch.bfloat16)
        weight = torch.randn(rows, columns, device=setting.device, dtype=torch.bfloat16)
        directions = {
            "forward": _forwards(x, weight),
            "input gradient": _backwards(gradient, weight),
        }
        for direction, ways in directions.items():
            plain = _seconds(ways.pop("bf16"))
            teraflops = 2 * _TOKENS * rows * columns / plain / 1e12
            ratios = []
            for way, product in ways.items():
                ratios.append(f"{way} {plain / _seconds(product):.2f}")
            yield CheckRow(
                f"{name}, {direction}: speed over bf16",
                None,
                f"bf16 {teraflops:.0f} TFLOP/s; {', '.join(ratios)}",
            )


def _stored(weight: Tensor, scaling: Fp8Scaling) -> tuple[Quantization, Tensor]:
    """The matrix as the project stores it."""
    rows, columns = weight.shape
    quantization = Quantization("fp8", rows, columns, scaling)
    stored = torch.empty(quantization.size, dtype=torch.uint8, device=weight.device)
    quantization.write(stored, weight)
    return quantization, stored


def _dynamic_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` in fp8 with one scale for all of it, as others do, and that scale."""
    # The largest value gets the largest code: 448 in e4m3.
    scale = x.abs().amax().float() / torch.finfo(FP8).max
    return (x / scale).to(FP8), scale


def _forwards(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute x W^T with x: [tokens, columns]."""
    by_row, stored_by_row = _stored(weight, "row")
    by_tensor, stored_by_tensor = _stored(weight, "tensor")
    codes, scale = _dynamic_codes(weight)

    def row_wise() -> Tensor:
        return product_in_fp8(x, stored_by_row, by_row, None)

    def tensor_wise() -> Tensor:
        return product_in_fp8(x, stored_by_tensor, by_tensor, None)

    def one_scale_for_x() -> Tensor:
        x_codes, x_scale = _dynamic_codes(x)
        return torch._scaled_mm(
            x_codes,
            codes.t(),
            x_scale,
            scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return {
        "bf16": lambda: F.linear(x, weight),
        "row": row_wise,
        "row compiled": _compiled(row_wise),
        "tensor": tensor_wise,
        "tensor compiled": _compiled(tensor_wise),
        "one scale for x too, compiled": _compiled(one_scale_for_x),
    }


def _backwards(gradient: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute G W with G: [tokens, rows]."""
    quantization, stored = _stored(weight, "tensor")
    # The second operand of a product in fp8 has its columns one after another.
    transposed = quantization.codes(stored).view(FP8).t().contiguous().t()
    scale = quantization.scales(stored)

    def decoded() -> Tensor:
        return gradient @ quantization.decode(stored, torch.bfloat16)

    def in_fp8() -> Tensor:
        return input_gradient_in_fp8(gradient, stored, quantization)

    def second_copy() -> Tensor:
        """The product of `in_fp8` without its transposing: beside it, what that costs."""
        return product_by_token(
            gradient, torch.float8_e5m2, transposed, scale, use_fast_accum=False
        )

    return {
        "bf16": lambda: gradient @ weight,
        "decoded": decoded,
        "decoded compiled": _compiled(decoded),
        "fp8": in_fp8,
        "fp8 compiled": _compiled(in_fp8),
        "a second copy of the codes, compiled": _compiled(second_copy),
    }


def _compiled(product: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`product` compiled for its sizes alone."""
    # By default the second size would make a kernel for all sizes, which may be slower.
    return torch.compile(product, dynamic=False)


def _seconds(product: Callable[[], Tensor]) -> float:
    """The median time of a product on the device."""
    # The first calls compile and choose kernels.
    for _ in range(3):
        product()
    times = []
    for _ in range(_TURNS):
        # Events are in the GPU's own queue: what Python takes to hand out the product is left out.
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        product()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
