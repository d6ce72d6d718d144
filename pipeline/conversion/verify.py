"""Verification of an exported folder: its logits on real text are compared with those of the
trained model.

Two correct models round differently, because they multiply in another order. How far that moves a
logit depends on the model. So the effect of rounding on the trained model itself is measured, and
the export may differ by `ROUNDINGS` times as much. `GRANTED` is always allowed; in 16 bits only the
divergence is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.conversion.fixed_gate import FixedGate
from pipeline.conversion.logit_comparison import (
    Comparison,
    LogitDifference,
    compare_texts,
    worst_of,
)
from pipeline.conversion.probe_texts import Probe
from pipeline.errors import ConversionError
from pipeline.hf.load import load_hf_model
from pipeline.hf.write import dtype_name

Loader = Callable[[Path, torch.dtype], Any]
"""Loads an exported folder in a type, as its users do."""


GRANTED = {
    torch.float32: LogitDifference(max_abs=1e-4, kl=1e-6),
    torch.float16: LogitDifference(max_abs=math.inf, kl=1e-4),
    torch.bfloat16: LogitDifference(max_abs=math.inf, kl=1e-4),
}
ROUNDINGS = 4
"""An export may differ by this many times the effect of rounding on the trained model."""
_MOST_BY_SCALE = 1e-3
"""Nats a token by which counting the scaled channels in a mean square may change a model."""
FINER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""By type, the type in which a model is run again to measure the effect of rounding."""


@dataclass(frozen=True)
class Report(LogitDifference):
    """The contents of verification.json: the worst over all texts, and each text's own figures.

    Attributes:
        dtype: the type in which both models ran.
        top1_agreement: the share of tokens after which both rank the same token first.
        rounding: the difference between the trained model in `dtype` and in twice the precision.
        rounding_top1_agreement: the share of tokens after which these two rank the same token
            first.
        scaling: the difference that it makes to the trained model if its norms count the added
            channels, scaled, as the export's norms do.
        texts: the comparison on each text, by its name.
    """

    dtype: str = ""
    top1_agreement: float = 1.0
    rounding: LogitDifference = field(default_factory=LogitDifference)
    rounding_top1_agreement: float = 1.0
    scaling: LogitDifference = field(default_factory=LogitDifference)
    texts: Mapping[str, Comparison] = field(default_factory=dict)


@torch.no_grad()
def verify(
    model: TrainedModel,
    folder: Path,
    probe: Probe,
    dtype: torch.dtype,
    stored_scale: float | None = None,
    load: Loader = load_hf_model,
) -> Report:
    """Compares the trained model with the export, both in `dtype`.

    Neither model is ever whole in memory: the trained one is read layer by layer, and the export is
    mapped from its files.

    A merged export stores the added channels times a small scale s, and its norms count them. Two
    comparisons then tell apart what s changes from faults: the export with a trained model whose
    norms count the scaled channels, too; and this one with the trained model itself.

    Args:
        model: the trained model.
        folder: the export.
        probe: the texts.
        dtype: the type in which both models run.
        stored_scale: s; None: the export has no scaled channels.
        load: loads the export.

    Raises:
        ConversionError: the models differ by more than rounding explains, or the scale changes the
            model noticeably.
    """
    windows = list(chain.from_iterable(probe.values()))
    gate: FixedGate | None = None
    if model.gate is not None:
        gate = FixedGate.of(model.gate)
        model = replace(model, gate=gate)
    # The first of these passes fixes the decisions of the gate for all others: order matters.
    scaled = replace(model, stored_scale=stored_scale)
    expected = scaled.logits(windows, dtype)
    # The same model in twice the precision: the difference is rounding, which the export may have,
    # too.
    finer = scaled.logits(windows, FINER[dtype])
    unscaled = expected
    if stored_scale is not None:
        unscaled = model.logits(windows, dtype)
    exported = load(folder, dtype)
    handle: RemovableHandle | None = None
    if gate is not None:
        handle = gate.fix_in(exported.token_gate, windows, str(folder))
    found: list[Tensor] = []
    # One window at a time and without a cache, as the training model ran them: a batch would
    # choose other kernels.
    for window in windows:
        logits = exported(window.unsqueeze(0), use_cache=False).logits
        found.append(logits[0].float())
    if handle is not None:
        handle.remove()

    texts = compare_texts(probe, expected, found)
    trained = compare_texts(probe, unscaled, expected)
    rounded = compare_texts(probe, finer, expected)
    for name, text in texts.items():
        perplexity_in_training = trained[name].training_perplexity
        texts[name] = replace(text, training_perplexity=perplexity_in_training)
    worst = worst_of(texts)
    rounding = worst_of(rounded)
    scaling = worst_of(trained)
    report = Report(
        max_abs=worst.max_abs,
        kl=worst.kl,
        dtype=dtype_name(dtype),
        top1_agreement=min(text.top1_agreement for text in texts.values()),
        rounding=rounding,
        rounding_top1_agreement=min(text.top1_agreement for text in rounded.values()),
        scaling=scaling,
        texts=texts,
    )
    check(report, GRANTED[dtype], str(folder))
    most_by_scale = max(_MOST_BY_SCALE, ROUNDINGS * rounding.kl)
    if not scaling.kl <= most_by_scale:  # written so that a NaN fails
        raise ConversionError(
            f"{folder}: the expansion stream is too large for an ordinary norm: with its channels "
            f"stored times {stored_scale:g}, the model changes by {scaling.kl:.3g} nats a token, "
            f"expected at most {most_by_scale:.3g}; use --format scale, or --dtype fp32 if it was "
            "another"
        )
    return report


def describe(report: Report) -> str:
    """The result of the verification, and the effect of rounding alone, for the log."""
    rounding = report.rounding
    return (
        f"verified in {report.dtype}: largest logit difference {report.max_abs:.2g}, "
        f"KL {report.kl:.2g}, same likeliest token {100 * report.top1_agreement:.2f} %; "
        f"rounding to {report.dtype} alone makes {rounding.max_abs:.2g}, {rounding.kl:.2g} and "
        f"{100 * report.rounding_top1_agreement:.2f} % in the trained model"
    )


def check(report: Report, granted: LogitDifference, folder: str) -> None:
    """Checks the difference of the two models.

    Raises:
        ConversionError: it is above `granted`, and above what rounding explains.
    """
    # The fixed bound is the larger one for small models, the measured one for deep models
    # (docs/adr/0007).
    max_abs = max(granted.max_abs, ROUNDINGS * report.rounding.max_abs)
    kl = max(granted.kl, ROUNDINGS * report.rounding.kl)
    if not (report.max_abs <= max_abs and report.kl <= kl):  # written so that a NaN fails
        raise ConversionError(
            f"{folder}: the exported model differs from the trained one by {report.max_abs:.3g} in "
            f"a logit (at most {max_abs:.3g}) and {report.kl:.3g} nats a token (at most {kl:.3g}); "
            "not kept"
        )
