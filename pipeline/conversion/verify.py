"""Is the exported folder the model that trained? Both compute logits on real text; a report says how they differ."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.conversion.hf_model import load_exported
from pipeline.conversion.probe import Probe
from pipeline.conversion.streamed import StreamedDecoder
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError


@dataclass(frozen=True)
class Difference:
    """Of two models' logits: the largest, and the mean Kullback-Leibler divergence in nats a token."""

    max_abs: float = 0.0
    kl: float = 0.0

    def worse(self, other: Difference) -> Difference:
        """The larger of each figure."""
        return Difference(max(self.max_abs, other.max_abs), max(self.kl, other.kl))


# The two models multiply in another order, and round otherwise. How much that may move a logit depends on the model; so
# what rounding does to the training model itself is measured, and the export may differ by a few times as much. These
# differences are always granted; in 16 bits the divergence alone decides.
GRANTED = {
    torch.float32: Difference(max_abs=1e-4, kl=1e-6),
    torch.float16: Difference(max_abs=math.inf, kl=1e-4),
    torch.bfloat16: Difference(max_abs=math.inf, kl=1e-4),
}
ROUNDINGS = 4
_FINER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}


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
    """The contents of verification.json: the worst over all texts, and each text's own figures.

    `rounding` is what the type does to the training model itself, compared with twice the precision.
    """

    dtype: str
    max_abs: float = 0.0
    kl: float = 0.0
    top1_agreement: float = 1.0
    rounding: Difference = field(default_factory=Difference)
    texts: dict[str, Comparison] = field(default_factory=dict)

    def add(self, name: str, comparison: Comparison, rounding: Difference) -> None:
        """Counts the text `name` in."""
        self.texts[name] = comparison
        self.max_abs = max(self.max_abs, comparison.max_abs)
        self.kl = max(self.kl, comparison.kl)
        self.top1_agreement = min(self.top1_agreement, comparison.top1_agreement)
        self.rounding = self.rounding.worse(rounding)

    def as_json(self) -> dict[str, Any]:
        """For `write_json`."""
        return asdict(self)


@torch.no_grad()
def verify(model: TrainedModel, folder: Path, probe: Probe, dtype: torch.dtype) -> Report:
    """Compares the training model with what `transformers` makes of `folder`, both in the type that it is written in.

    Adapters alone go through PEFT. Neither model is ever whole in memory: of the one a layer is, and the other is
    mapped from its files.

    Raises:
        ConversionError: they are further apart than rounding explains.
    """
    windows = [window for windows in probe.values() for window in windows]
    finer = iter(StreamedDecoder(model, _FINER[dtype]).logits(windows))
    training = iter(StreamedDecoder(model, dtype).logits(windows))
    exported = load_exported(folder, model.base.path, dtype)
    report = Report(str(dtype).removeprefix("torch."))
    for name, of_text in probe.items():
        expected = [next(training) for _ in of_text]
        found = [exported(window.unsqueeze(0), use_cache=False).logits[0].float() for window in of_text]
        rounding = compare(of_text, [next(finer) for _ in of_text], expected)
        report.add(name, compare(of_text, expected, found), Difference(rounding.max_abs, rounding.kl))
    check(report, GRANTED[dtype], str(folder))
    return report


def check(report: Report, granted: Difference, folder: str) -> None:
    """Raises ConversionError where the two models differ by more than is granted, and than rounding explains."""
    allowed = granted.worse(Difference(ROUNDINGS * report.rounding.max_abs, ROUNDINGS * report.rounding.kl))
    # Written so that a NaN fails.
    if not (report.max_abs <= allowed.max_abs and report.kl <= allowed.kl):
        raise ConversionError(
            f"{folder}: the exported model differs from the trained one by {report.max_abs:.3g} in a logit (at most "
            f"{allowed.max_abs:.3g}) and {report.kl:.3g} nats a token (at most {allowed.kl:.3g}); not kept"
        )


def compare(windows: list[Tensor], expected: list[Tensor], found: list[Tensor]) -> Comparison:
    """The figures over all windows of one text; logits are [S, V]."""
    comparison = Comparison(tokens=sum(len(window) for window in windows))
    agreed, divergence, nll_expected, nll_found, targets = 0.0, 0.0, 0.0, 0.0, 0
    for window, mine, theirs in zip(windows, expected, found, strict=True):
        difference = float((mine.float() - theirs.float()).abs().max())
        comparison.max_abs = max(comparison.max_abs, math.inf if math.isnan(difference) else difference)
        agreed += float((mine.argmax(-1) == theirs.argmax(-1)).sum())
        p, q = F.log_softmax(mine.double(), dim=-1), F.log_softmax(theirs.double(), dim=-1)
        divergence += float((p.exp() * (p - q)).sum())
        nll_expected += float(F.nll_loss(p[:-1], window[1:], reduction="sum"))
        nll_found += float(F.nll_loss(q[:-1], window[1:], reduction="sum"))
        targets += len(window) - 1
    comparison.kl = math.inf if math.isnan(divergence) else divergence / comparison.tokens
    comparison.top1_agreement = agreed / comparison.tokens
    comparison.training_perplexity = math.exp(nll_expected / targets)
    comparison.exported_perplexity = math.exp(nll_found / targets)
    return comparison
