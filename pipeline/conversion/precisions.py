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
from transformers import PreTrainedModel

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
    scale, low = (parts.amax(-1, keepdim=True) - low) / 15, -low
    scale, low = (_six_bits(values) for values in (scale, low))
    return (_divided(parts + low, scale).round().clamp(0, 15) * scale - low).flatten(1)


def _six_bits(values: Tensor) -> Tensor:
    factor = (values.amax(-2, keepdim=True) / 63).half().float()
    return _divided(values, factor).round().clamp(0, 63) * factor


def _fp8_per_tensor(weight: Tensor) -> Tensor:
    return rounded(weight.reshape(1, -1), "fp8").view_as(weight)


@dataclass(frozen=True)
class _Quantization:
    """How a matrix is rounded; `block`: what its rows have to be a multiple of; `everywhere`: embeddings as well."""

    round: Callable[[Tensor], Tensor]
    block: int = 1
    everywhere: bool = False


_QUANTIZATIONS = {
    "int8": _Quantization(_int8),
    "fp8": _Quantization(partial(rounded, precision="fp8")),
    "fp8_tensor": _Quantization(_fp8_per_tensor),
    "nf4": _Quantization(partial(rounded, precision="nf4")),
    "q8_0": _Quantization(_q8_0, 32, everywhere=True),
    "q4_k": _Quantization(_q4_k, 256, everywhere=True),
}


def stored_as(weight: Tensor, precision: ServedPrecision, *, in_linear_map: bool = True) -> Tensor:
    """`weight` as `precision` stores it, of the same shape, in the type that is computed with."""
    if precision in TYPES:
        return weight.to(TYPES[precision])
    quantization = _QUANTIZATIONS[precision]
    if weight.dim() == 2 and (in_linear_map or quantization.everywhere):
        if weight.shape[1] % quantization.block == 0:
            return quantization.round(weight.float()).to(weight.dtype)
        return weight.half().to(weight.dtype)
    return weight


@contextmanager
def served_in(model: PreTrainedModel, precision: ServedPrecision) -> Iterator[None]:
    """Makes `model` compute with weights of `precision`, which one module has at a time: the model may be mapped.

    A gate and PEFT's adapters keep their type, as servers keep it.
    """
    handles, kept, as_they_are = [], {}, ("lora_", *(model._keep_in_fp32_modules_strict or ()))
    embeddings, output = set(model.get_input_embeddings().modules()), model.get_output_embeddings()

    def convert(module: nn.Module, *_: Any) -> None:  # noqa: ANN401
        kept[module] = [parameter.data for parameter in module.parameters(recurse=False)]
        for parameter in module.parameters(recurse=False):
            is_linear = isinstance(module, nn.Linear) and module is not output
            parameter.data = stored_as(parameter.data, precision, in_linear_map=is_linear)

    def restore(module: nn.Module, *_: Any) -> None:  # noqa: ANN401
        for parameter, values in zip(module.parameters(recurse=False), kept.pop(module), strict=True):
            parameter.data = values

    for name, module in model.named_modules():
        has_weights = next(module.parameters(recurse=False), None) is not None
        if has_weights and not any(part in name for part in as_they_are):
            # Where the embedding is tied, the output projection may read its matrix.
            during = model if module in embeddings and model.config.tie_word_embeddings else module
            handles.append(during.register_forward_pre_hook(partial(convert, module)))
            handles.append(during.register_forward_hook(partial(restore, module), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def nll_in(model: PreTrainedModel, precision: ServedPrecision, probe: Probe) -> dict[str, float]:
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

    @classmethod
    def of(cls, export: Nll, base: Nll, plain_export: Nll, plain_base: Nll) -> Loss:
        """From the nll of both models in the precision, and in the one that they are compared with (`plain`)."""

        def factor(found: Nll, plain: Nll) -> float:
            best = min(plain, key=plain.__getitem__)
            return perplexity(found[best] - plain[best])

        perplexities = {text: perplexity(value) for text, value in export.items()}
        return cls(perplexities, factor(export, plain_export), factor(base, plain_base))

    @property
    def is_acceptable(self) -> bool:
        """Whether the export loses hardly more than its base, or the base itself cannot be served so."""
        return not self.base_factor < math.inf or self.export_factor <= (1 + TOLERANCE) * max(1.0, self.base_factor)


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
    return {name: Loss.of(of_export[name], of_base[name], plain, of_base[own]) for name in wanted}


def describe(name: ServedPrecision, loss: Loss) -> str:
    """What a precision costs, in half a line."""
    return (
        f"in {name} its perplexity grows by a factor of {loss.export_factor:.4g}, the base's by {loss.base_factor:.4g} "
        f"(accepted is {100 * TOLERANCE:g} % more)"
    )
