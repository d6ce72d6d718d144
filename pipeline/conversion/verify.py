"""Is the exported folder the model that trained? Both compute logits on real text; a report says how they differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.conversion.hf_model import load_hf_model
from pipeline.conversion.probe import Probe
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError

Logits = Callable[[Tensor], Tensor]
"""Tokens [S] -> logits [S, V] in fp32."""


@dataclass(frozen=True)
class Tolerance:
    """What may differ: the largest logit difference, and the mean Kullback-Leibler divergence in nats a token."""

    max_abs: float
    kl: float


# In fp32 only the order of summation differs. In 16 bits every weight is rounded, by up to 2^-9 (bf16) or 2^-12 (fp16)
# of itself: what that does to a logit depends on the model, so there the divergence is what counts.
TOLERANCES = {
    torch.float32: Tolerance(max_abs=1e-4, kl=1e-6),
    torch.float16: Tolerance(max_abs=math.inf, kl=1e-4),
    torch.bfloat16: Tolerance(max_abs=math.inf, kl=1e-2),
}


@dataclass
class Comparison:
    """Two models on one text. `top1_agreement` is the share of tokens after which both find the same one likeliest."""

    tokens: int = 0
    max_abs: float = 0.0
    kl: float = 0.0
    top1_agreement: float = 0.0
    training_perplexity: float = 0.0
    exported_perplexity: float = 0.0


@dataclass
class Report:
    """The contents of verification.json: the worst over all texts, and each text's own figures."""

    dtype: str
    tolerance: dict[str, float | None]
    max_abs: float = 0.0
    kl: float = 0.0
    top1_agreement: float = 1.0
    texts: dict[str, Comparison] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For `write_json`."""
        return asdict(self)


def verify(model: TrainedModel, folder: Path, probe: Probe, dtype: torch.dtype) -> Report:
    """Compares the training model, in fp32, with what `transformers` makes of `folder`, run in fp32 as well.

    One model is in memory at a time.

    Raises:
        ConversionError: they are further apart than the tolerance of `dtype`.
    """
    expected = _training_logits(model, probe)
    found = _exported_logits(folder, probe)
    tolerance = TOLERANCES[dtype]
    bounds = {key: None if math.isinf(value) else value for key, value in asdict(tolerance).items()}
    report = Report(str(dtype).removeprefix("torch."), bounds)
    for name, windows in probe.items():
        comparison = compare(windows, expected[name], found[name])
        report.texts[name] = comparison
        report.max_abs = max(report.max_abs, comparison.max_abs)
        report.kl = max(report.kl, comparison.kl)
        report.top1_agreement = min(report.top1_agreement, comparison.top1_agreement)
    # Written so that a NaN fails.
    if not (report.max_abs <= tolerance.max_abs and report.kl <= tolerance.kl):
        raise ConversionError(
            f"{folder}: the exported model differs from the trained one by {report.max_abs:.3g} in a logit "
            f"(at most {tolerance.max_abs:g}) and {report.kl:.3g} nats a token (at most {tolerance.kl:g}); not kept"
        )
    return report


def compare(windows: list[Tensor], expected: list[Tensor], found: list[Tensor]) -> Comparison:
    """The figures over all windows of one text; logits are [S, V]."""
    comparison = Comparison(tokens=sum(len(window) for window in windows))
    agreed, divergence, nll_expected, nll_found, targets = 0.0, 0.0, 0.0, 0.0, 0
    for window, mine, theirs in zip(windows, expected, found, strict=True):
        difference = float((mine - theirs).abs().max())
        comparison.max_abs = max(comparison.max_abs, math.inf if math.isnan(difference) else difference)
        agreed += float((mine.argmax(-1) == theirs.argmax(-1)).sum())
        p, q = F.log_softmax(mine.double(), dim=-1), F.log_softmax(theirs.double(), dim=-1)
        divergence += float((p.exp() * (p - q)).sum())
        nll_expected += float(F.nll_loss(p[:-1], window[1:], reduction="sum"))
        nll_found += float(F.nll_loss(q[:-1], window[1:], reduction="sum"))
        targets += len(window) - 1
    comparison.kl = divergence / comparison.tokens
    comparison.top1_agreement = agreed / comparison.tokens
    comparison.training_perplexity = math.exp(nll_expected / targets)
    comparison.exported_perplexity = math.exp(nll_found / targets)
    return comparison


def _training_logits(model: TrainedModel, probe: Probe) -> dict[str, list[Tensor]]:
    decoder = model.decoder()
    return _on_probe(probe, lambda window: decoder.logits(window.unsqueeze(0))[0])


def _exported_logits(folder: Path, probe: Probe) -> dict[str, list[Tensor]]:
    exported = load_hf_model(folder, torch.float32)
    return _on_probe(probe, lambda window: exported(window.unsqueeze(0), use_cache=False).logits[0].float())


@torch.no_grad()
def _on_probe(probe: Probe, logits: Logits) -> dict[str, list[Tensor]]:
    return {name: [logits(window) for window in windows] for name, windows in probe.items()}
