"""Verification of a difference: closed tokens against the base, open ones against what trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.conversion.fixed_gate import FixedGate
from pipeline.conversion.logit_comparison import LogitDifference, compare_texts, worst_of
from pipeline.conversion.probe_texts import Probe
from pipeline.conversion.verify import FINER, GRANTED, ROUNDINGS, Report
from pipeline.errors import ConversionError
from pipeline.hf.load import load_hf_model
from pipeline.hf.write import dtype_name

LOST = {4: 0.05, 8: 0.02, 16: 0.02}
"""By bits, the largest KL(trained || exported) that is allowed over open tokens, as a share of
KL(trained || base): what rounding loses, over what training changed."""


@dataclass(frozen=True)
class DifferenceReport(Report):
    """The contents of verification.json for a difference.

    Where the gate is closed, the export is compared with the base, and where it is open, with the
    trained model. `kl` is KL(trained || exported) over all open tokens.

    Attributes:
        bits: the bits of an element of a matrix within layers.
        closed_tokens: the number of closed tokens, whose logits were compared with the base's. If
            one of them differs in any bit, the folder is not kept.
        open_tokens: the number of open tokens. If the gate opened for none, all tokens count, with
            the gate held open.
        kl_from_base: KL(trained || base) in nats a token, over the open tokens.
        lost: `kl` as a share of `kl_from_base`.
    """

    bits: int = 4
    closed_tokens: int = 0
    open_tokens: int = 0
    kl_from_base: float = 0.0
    lost: float = 0.0


@torch.no_grad()
def verify_difference(
    model: TrainedModel, folder: Path, probe: Probe, dtype: torch.dtype
) -> DifferenceReport:
    """Compares the export, as transformers loads it, with the base and with the trained model.

    Three things must hold:

    - The export's gate decides as the trained model's does, except where rounding explains a
      difference.
    - The logits of closed tokens are the base's, as transformers computes them, to the bit.
    - Over the open tokens, KL(trained || exported) is at most LOST times KL(trained || base), or
      what rounding alone explains.

    Raises:
        ConversionError: one of these does not hold.
    """
    assert model.gate is not None, "checked before"
    windows = list(chain.from_iterable(probe.values()))
    gate = FixedGate.of(model.gate)
    untrained = replace(model, untrained=True, gate=None)
    # Two passes over the base's stream: the first fixes the decisions, and both together tell how
    # far rounding moves a score.
    for precision in (dtype, FINER[dtype]):
        decoder, _ = untrained.streamed(precision)
        tokens = nn.utils.rnn.pad_sequence(windows, batch_first=True)
        gate.is_open(decoder.base_stream(tokens, layer=gate.layer))
    trained = replace(model, gate=None).logits(windows, dtype)
    finer = replace(model, gate=None).logits(windows, FINER[dtype])

    exported = load_hf_model(folder, dtype)
    original = load_hf_model(model.base.path, dtype)
    # For each window, logits [S, V]: the base's, the export's, and those that the export should
    # have.
    of_base: list[Tensor] = []
    found: list[Tensor] = []
    expected: list[Tensor] = []
    # For each window, bool [S]: whether the gate is open for a token.
    opens: list[Tensor] = []
    handle = gate.fix_in(exported.token_gate, windows, str(folder))
    # One window at a time, as the trained model ran them: a batch would choose other kernels.
    for number, window in enumerate(windows):
        text = window.unsqueeze(0)
        logits = exported(text, use_cache=False).logits[0]
        base_logits = original(text, use_cache=False).logits[0]
        is_open = gate.passes[0][number, : len(window)] > gate.threshold
        is_open |= gate.opens_id(window)
        if not torch.equal(logits[~is_open], base_logits[~is_open]):
            raise ConversionError(
                f"{folder}: where the gate is closed, the export's logits are not the base's to "
                "the bit; not kept: report it"
            )
        opens.append(is_open)
        of_base.append(base_logits.float())
        found.append(logits.float())
        expected.append(torch.where(is_open[:, None], trained[number], of_base[number]))
    handle.remove()
    closed_tokens = sum(int((~is_open).sum()) for is_open in opens)
    texts = compare_texts(probe, expected, found)
    if not any(is_open.any() for is_open in opens):
        # Nothing opens: the difference is checked on all tokens, with the gate held open.
        exported.token_gate.threshold = -torch.inf
        opens = []
        found = []
        for window in windows:
            opens.append(torch.ones_like(window, dtype=torch.bool))
            found.append(exported(window.unsqueeze(0), use_cache=False).logits[0])

    kl = _mean_kl(trained, found, opens)
    from_base = _mean_kl(trained, of_base, opens)
    report = DifferenceReport(
        max_abs=worst_of(texts).max_abs,
        kl=kl,
        dtype=dtype_name(dtype),
        top1_agreement=min(text.top1_agreement for text in texts.values()),
        rounding=LogitDifference(kl=_mean_kl(finer, trained, opens)),
        texts=texts,
        bits=exported.config.bits,
        closed_tokens=closed_tokens,
        open_tokens=sum(int(is_open.sum()) for is_open in opens),
        kl_from_base=from_base,
        lost=kl / from_base if from_base > 0 else 0.0,
    )
    _check_lost(report, GRANTED[dtype], str(folder))
    return report


def _mean_kl(
    expected: Sequence[Tensor], found: Sequence[Tensor], counts: Sequence[Tensor]
) -> float:
    """KL(expected || found) in nats a token, over the tokens that count.

    expected, found: logits [S, V] of each window; counts: bool [S] of each.
    """
    total = 0.0
    tokens = 0
    for z_expected, z_found, is_counted in zip(expected, found, counts, strict=True):
        # In fp64: KL sums differences of nearly equal numbers over the vocabulary.
        p = F.log_softmax(z_expected[is_counted].double(), dim=-1)
        q = F.log_softmax(z_found[is_counted].double(), dim=-1)
        total += float((p.exp() * (p - q)).sum())
        tokens += int(is_counted.sum())
    return total / tokens


def _check_lost(report: DifferenceReport, granted: LogitDifference, folder: str) -> None:
    """Checks that the export loses no more of what was trained than its bits explain.

    Raises:
        ConversionError: it loses more.
    """
    by_bits = LOST[report.bits] * report.kl_from_base
    most = max(by_bits, granted.kl, ROUNDINGS * report.rounding.kl)
    if not report.kl <= most:  # written so that a NaN fails
        raise ConversionError(
            f"{folder}: on open tokens the export differs from the trained model by "
            f"{report.kl:.3g} nats a token, expected at most {most:.3g}, "
            f"{LOST[report.bits]:.0%} of what training changed; not kept: take more --bits, or a "
            "smaller --min-count"
        )


def describe_difference(report: DifferenceReport) -> str:
    """The result of the verification, for the log."""
    closed = f"closed tokens have the base's logits to the bit ({report.closed_tokens:,} tokens)"
    if report.closed_tokens == 0:
        closed = "no closed token was compared with the base, as the gate opens for every token"
    return (
        f"verified in {report.dtype}: {closed}; {report.bits} bits lose {100 * report.lost:.2g} % "
        f"of what training changed on open tokens (KL {report.kl:.2g} of "
        f"{report.kl_from_base:.2g} nats a token)"
    )
