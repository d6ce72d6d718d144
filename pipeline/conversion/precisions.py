"""What a server's precision costs an exported model, next to what it costs the base.

Weights are rounded as the precision stores them and computed with in floating point; activations are not quantised.
A folder that is right in the type of its files can still fail elsewhere: a stock export stores a part of the residual
stream scaled down (`conversion.stock`), and small numbers vanish in formats with few exponent bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


_GGUF_BLOCK = 32


def stored_as(weight: Tensor, precision: ServedPrecision, *, in_linear_map: bool = True) -> Tensor:
    """`weight` as `precision` stores it, of the same shape, in the type that is computed with."""
    if precision in TYPES:
        return weight.to(TYPES[precision])
    if weight.dim() != 2 or not (in_linear_map or precision == "q8_0"):
        return weight
    if precision == "fp8" or precision == "nf4":  # mypy narrows by it
        return rounded(weight.float(), precision).to(weight.dtype)
    if weight.shape[1] % _GGUF_BLOCK:
        return weight.half().to(weight.dtype)
    blocks = weight.float().unflatten(1, (-1, _GGUF_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, blocks / scale, 0).round()
    return (codes * scale.half().float()).flatten(1).to(weight.dtype)  # ggml stores the scale in fp16


class _Stored(nn.Module):
    """A parametrization: a parameter reads as `precision` stores it. Nothing is kept, so the model may be mapped."""

    def __init__(self, precision: ServedPrecision, *, in_linear_map: bool) -> None:
        super().__init__()
        self.precision, self.in_linear_map = precision, in_linear_map

    def forward(self, weight: Tensor) -> Tensor:
        return stored_as(weight, self.precision, in_linear_map=self.in_linear_map)


@torch.no_grad()
def nll_in(model: Any, precision: ServedPrecision, probe: Probe) -> dict[str, float]:
    """The nll a token of each text (a list of windows [S]), by a model of transformers or PEFT in that precision.

    A gate and PEFT's adapters keep their type, as servers keep it. Afterwards the model is as it was.
    """
    as_they_are = ("lora_", *(model._keep_in_fp32_modules_strict or ()))
    output, served, found = model.get_output_embeddings(), [], {}
    for path, module in list(model.named_modules()):
        if not any(part in path for part in as_they_are):
            stored = _Stored(precision, in_linear_map=isinstance(module, nn.Linear) and module is not output)
            for name, _ in list(module.named_parameters(recurse=False)):
                parametrize.register_parametrization(module, name, stored, unsafe=True)  # it may change the type
                served.append((module, name))
    for text, windows in probe.items():
        logits = (model(window.unsqueeze(0), use_cache=False).logits[0, :-1].double() for window in windows)
        nll = (F.cross_entropy(of, window[1:], reduction="sum") for of, window in zip(logits, windows, strict=True))
        found[text] = float(sum(nll)) / sum(len(window) - 1 for window in windows)
    for module, name in served:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
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
    export: tuple[Path, Probe], base: tuple[Path, Probe], dtype: torch.dtype, wanted: Sequence[ServedPrecision]
) -> dict[ServedPrecision, Loss]:
    """What each precision costs the export, whose files are in `dtype`, and its base.

    Each is a folder, and the text in the tokens of its own vocabulary.
    """
    own: ServedPrecision = next(name for name, its in TYPES.items() if its == dtype)
    nll, factors = [], []
    for path, probe in (export, base):
        model = load_exported(path, base[0], dtype)
        found = {name: nll_in(model, name, probe) for name in dict.fromkeys((own, *wanted))}
        best = min(probe, key=found[own].__getitem__)
        nll.append(found)
        factors.append({name: perplexity(found[name][best] - found[own][best]) for name in wanted})
    return {
        name: Loss({text: perplexity(its) for text, its in nll[0][name].items()}, factors[0][name], factors[1][name])
        for name in wanted
    }
