"""What a server's precision costs an exported model, next to what it costs the base.

Weights are rounded as the precision stores them and computed with in floating point; activations are not quantised.
A folder that is right in the type of its files can still fail elsewhere: a stock export stores a part of the residual
stream scaled down (`conversion.stock`), and small numbers vanish in formats with few exponent bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipeline.conversion import ServedPrecision
from pipeline.conversion.hf_folder import load_exported
from pipeline.conversion.verify import Probe
from pipeline.model.output import perplexity
from pipeline.parallel.quantized import rounded

TYPES: dict[ServedPrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 0.01
"""How much more perplexity than its base an export may lose to a precision."""
Nll = Mapping[str, float]
"""The nll a token of each text."""


def _divided(blocks: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, blocks / scale, 0)


def _int8(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return _divided(rows, scale).round() * scale


def _q8_0(rows: Tensor) -> Tensor:
    blocks = rows.unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (_divided(blocks, scale).round() * scale.half().float()).flatten(1)  # ggml stores the scale in fp16


def _q4_k(rows: Tensor) -> Tensor:
    """Blocks of 256: eight sub-blocks of 32 with a scale and a minimum in 6 bits each, whose factors are in fp16."""
    parts = rows.unflatten(1, (-1, 8, 32))
    low = parts.amin(-1, keepdim=True).clamp(max=0)
    scale, low = (_six_bits(values) for values in ((parts.amax(-1, keepdim=True) - low) / 15, -low))
    return (_divided(parts + low, scale).round().clamp(0, 15) * scale - low).flatten(1)


def _six_bits(values: Tensor) -> Tensor:
    factor = (values.amax(-2, keepdim=True) / 63).half().float()
    return _divided(values, factor).round().clamp(0, 63) * factor


_QUANTIZED: dict[ServedPrecision, Callable[[Tensor], Tensor]] = {
    "int8": _int8,
    "fp8": partial(rounded, precision="fp8"),
    "fp8_tensor": lambda weight: rounded(weight.reshape(1, -1), "fp8").view_as(weight),
    "nf4": partial(rounded, precision="nf4"),
    "q8_0": _q8_0,
    "q4_k": _q4_k,
}
_GGUF_BLOCKS = {"q8_0": 32, "q4_k": 256}
"""GGUF's formats, which embeddings have too, and what a row has to be a multiple of; others are in fp16."""


def stored_as(weight: Tensor, precision: ServedPrecision, *, in_linear_map: bool = True) -> Tensor:
    """`weight` as `precision` stores it, of the same shape, in the type that is computed with."""
    if precision in TYPES:
        return weight.to(TYPES[precision])
    if weight.dim() != 2 or not (in_linear_map or precision in _GGUF_BLOCKS):
        return weight
    if weight.shape[1] % _GGUF_BLOCKS.get(precision, 1):
        return weight.half().to(weight.dtype)
    return _QUANTIZED[precision](weight.float()).to(weight.dtype)


class _Stored(nn.Module):
    """A parametrization: a parameter reads as `precision` stores it. Nothing is kept, so the model may be mapped."""

    def __init__(self, precision: ServedPrecision, *, in_linear_map: bool) -> None:
        super().__init__()
        self.precision, self.in_linear_map = precision, in_linear_map

    def forward(self, weight: Tensor) -> Tensor:
        return stored_as(weight, self.precision, in_linear_map=self.in_linear_map)


@contextmanager
def served_in(model: Any, precision: ServedPrecision) -> Iterator[None]:  # noqa: ANN401
    """Makes a model of transformers or PEFT compute with weights of `precision`; afterwards it is as it was.

    A gate and PEFT's adapters keep their type, as servers keep it.
    """
    as_they_are = ("lora_", *(model._keep_in_fp32_modules_strict or ()))
    output, served = model.get_output_embeddings(), []
    for path, module in list(model.named_modules()):
        if not any(part in path for part in as_they_are):
            stored = _Stored(precision, in_linear_map=isinstance(module, nn.Linear) and module is not output)
            for name, _ in list(module.named_parameters(recurse=False)):
                parametrize.register_parametrization(module, name, stored, unsafe=True)  # it may change the type
                served.append((module, name))
    try:
        yield
    finally:
        for module, name in served:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)


@torch.no_grad()
def nll_in(model: Any, precision: ServedPrecision, probe: Probe) -> dict[str, float]:  # noqa: ANN401
    """The nll a token of each text (a list of windows [S]), with weights of `precision`."""
    found = {}
    with served_in(model, precision):
        for name, windows in probe.items():
            logits = (model(window.unsqueeze(0), use_cache=False).logits[0, :-1].double() for window in windows)
            nll = (F.cross_entropy(of, window[1:], reduction="sum") for of, window in zip(logits, windows, strict=True))
            found[name] = float(sum(nll)) / sum(len(window) - 1 for window in windows)
    return found


@dataclass(frozen=True)
class Loss:
    """What a precision costs: perplexities by text, and by which factor the export's and the base's grow.

    The factors are those of the text that each model predicts best.
    """

    perplexities: Mapping[str, float]
    export_factor: float
    base_factor: float

    @property
    def is_acceptable(self) -> bool:
        """Whether the export loses hardly more than its base, or the base itself cannot be served so."""
        return not self.base_factor < math.inf or self.export_factor <= (1 + TOLERANCE) * max(1.0, self.base_factor)

    def __str__(self) -> str:
        return (
            f"its perplexity grows by a factor of {self.export_factor:.4g}, the base's by {self.base_factor:.4g} "
            f"(accepted is {100 * TOLERANCE:g} % more)"
        )


def losses(
    export: tuple[Path, Probe],
    base: tuple[Path, Probe],
    plain: Nll,
    dtype: torch.dtype,
    wanted: Sequence[ServedPrecision],
) -> dict[ServedPrecision, Loss]:
    """What each precision costs the export, whose files are in `dtype` and give it the nll `plain`, and its base.

    Each is a folder, and the text in the tokens of its own vocabulary.
    """
    own: ServedPrecision = next(name for name, its in TYPES.items() if its == dtype)
    of_export, of_base = {own: plain}, dict[ServedPrecision, Nll]()
    for (path, probe), found in ((export, of_export), (base, of_base)):
        model = load_exported(path, base[0], dtype)
        for name in dict.fromkeys((own, *wanted)):
            if name not in found:
                found[name] = nll_in(model, name, probe)

    def factor(found: Mapping[ServedPrecision, Nll], name: ServedPrecision) -> float:
        best = min(found[own], key=found[own].__getitem__)
        return perplexity(found[name][best] - found[own][best])

    return {
        name: Loss(
            {text: perplexity(nll) for text, nll in of_export[name].items()},
            export_factor=factor(of_export, name),
            base_factor=factor(of_base, name),
        )
        for name in wanted
    }
