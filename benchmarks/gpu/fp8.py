"""What a frozen product costs in bf16 and in fp8: with a scale for each row, and with one scale a
matrix."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.setting import CheckRow, Setting
from pipeline.parallel.quantized import FP8, Quantization, computes_in_fp8, product_in_fp8

_TOKENS = 8192
_SHAPES = {
    "8B attention": (4096, 4096),
    "8B gate and up": (14336, 4096),
    "8B down": (4096, 14336),
    "1B gate and up": (8192, 2048),
}
"""Rows and columns of the matrices of Llama 3."""
_TURNS = 20
_LARGEST = torch.finfo(FP8).max
_LARGEST_GRADIENT = torch.finfo(torch.float8_e5m2).max


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
        forwards, backwards = _forwards(x, weight), _backwards(gradient, weight)
        for direction, ways in (("forward", forwards), ("input gradient", backwards)):
            seconds = {way: _seconds(product) for way, product in ways.items()}
            plain = seconds["bf16"]
            teraflops = 2 * _TOKENS * rows * columns / plain / 1e12
            ratios = ", ".join(
                f"{way} {plain / own:.2f}" for way, own in seconds.items() if way != "bf16"
            )
            yield CheckRow(
                f"{name}, {direction}: speed over bf16",
                None,
                f"bf16 {teraflops:.0f} TFLOP/s; {ratios}",
            )


def _by_rows(weight: Tensor) -> tuple[Quantization, Tensor]:
    """The matrix as the project stores it, with a scale for each row."""
    quantization = Quantization("fp8", *weight.shape)
    stored = torch.empty(quantization.size, dtype=torch.uint8, device=weight.device)
    quantization.write(stored, weight)
    return quantization, stored


def _by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the matrix and its one scale."""
    scale = weight.abs().amax().float() / _LARGEST
    return (weight / scale).to(FP8), scale


def _forwards(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute x W^T with x: [tokens, columns]."""
    quantization, stored = _by_rows(weight)
    codes, scale = _by_tensor(weight)

    def by_rows() -> Tensor:
        return product_in_fp8(x, stored, quantization, None)

    def by_tensor() -> Tensor:
        x_scale = x.abs().amax().float() / _LARGEST
        return torch._scaled_mm(
            (x / x_scale).to(FP8),
            codes.t(),
            x_scale,
            scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return {
        "bf16": lambda: F.linear(x, weight),
        "row-wise": by_rows,
        "row-wise compiled": torch.compile(by_rows),
        "tensor-wise": by_tensor,
        "tensor-wise compiled": torch.compile(by_tensor),
    }


def _backwards(gradient: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute G W with G: [tokens, rows]."""
    quantization, stored = _by_rows(weight)
    codes, scale = _by_tensor(weight)
    # The second operand of a product in fp8 has its columns one after another.
    transposed = codes.t().contiguous().t()

    def decoded() -> Tensor:
        return gradient @ quantization.decode(stored, torch.bfloat16)

    def product(matrix: Tensor, own_type: torch.dtype, largest: float) -> Tensor:
        own_scale = gradient.abs().amax().float() / largest
        codes_of_gradient = (gradient / own_scale).to(own_type)
        return torch._scaled_mm(
            codes_of_gradient,
            matrix,
            own_scale,
            scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )

    def e5m2() -> Tensor:
        return product(transposed, torch.float8_e5m2, _LARGEST_GRADIENT)

    def e4m3() -> Tensor:
        return product(transposed, FP8, _LARGEST)

    def transposing() -> Tensor:
        return product(codes.t().contiguous().t(), torch.float8_e5m2, _LARGEST_GRADIENT)

    return {
        "bf16": lambda: gradient @ weight,
        "decoded": decoded,
        "decoded compiled": torch.compile(decoded),
        "e5m2": e5m2,
        "e5m2 compiled": torch.compile(e5m2),
        "e4m3 compiled": torch.compile(e4m3),
        "e5m2 compiled, transposing each time": torch.compile(transposing),
    }


def _seconds(product: Callable[[], Tensor]) -> float:
    """The median time of a product on the device."""
    for _ in range(3):
        product()
    times = []
    for _ in range(_TURNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        product()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
