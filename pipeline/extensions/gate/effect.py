"""What a gate does to held-out text: how much of it opens, what that costs, and its perplexity.

The perplexity is measured with the gate, without it, and with the base alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.data.dataset.packing import IGNORED
from pipeline.extensions.gate.inputs import decoder_inputs
from pipeline.extensions.gate.windows import Windows
from pipeline.gating.folder import FIRST_TOKENS, HeldoutText
from pipeline.gating.gate import FittedGate
from pipeline.log import progress_bar
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.output import perplexity
from pipeline.model.paths import TokenBatch
from pipeline.open_tokens import OpenTokens
from pipeline.scale_math import NEVER


@torch.no_grad()
def reference_nll(
    decoder: CausalDecoder, base: CausalDecoder, windows: Windows, config: RunConfig
) -> Tensor:
    """The nll of the targets by the base, and by the trained model without its gate: [2, N, S], in
    fp64.

    Args:
        decoder: the trained model.
        base: the base. It is `decoder` itself, except after full fine-tuning.
        windows: N windows of S tokens.
        config: the run.
    """
    decoder.gate = None
    found: list[Tensor] = []
    with progress_bar("scoring new text", len(windows), " sequences") as bar:
        for group in windows.groups():
            found.append(_reference_nll(decoder, base, group, config))
            bar.update(len(group))
    return torch.cat(found, dim=1)


def _reference_nll(
    decoder: CausalDecoder, base: CausalDecoder, group: Windows, config: RunConfig
) -> Tensor:
    """`reference_nll` of a group of windows."""
    inputs, targets = decoder_inputs(group, config, decoder)
    of_base = _nll(base, base_states(base, inputs), targets)
    ungated = _nll(decoder, decoder.hidden_states(*inputs), targets)
    return torch.stack([of_base, ungated]).view(2, *group.tokens.shape)


@torch.no_grad()
def measure(
    decoder: CausalDecoder,
    base: CausalDecoder,
    gate: FittedGate,
    heldout: Mapping[str, Windows],
    config: RunConfig,
    known: Mapping[str, Tensor],
) -> tuple[dict[str, HeldoutText], float | None]:
    """The effect of `gate` on held-out text.

    Args:
        decoder: the trained model, without a gate.
        base: the base. It is `decoder` itself, except after full fine-tuning.
        gate: the gate to measure.
        heldout: the held-out windows of each corpus, by its name.
        config: the run.
        known: the `reference_nll` of corpora where it was computed before.

    Returns:
        The effect on each corpus.
        The largest difference of a logit from the base's, in sequences on which the gate never
        opens. It is None if the gate opens in every sequence, and for full fine-tuning, where the
        base is a model of its own: its logits are compared when the export joins the two models.
    """
    texts: dict[str, HeldoutText] = {}
    differences: list[float] = []
    total = sum(len(windows) for windows in heldout.values())
    with progress_bar("measuring the gate", total, " sequences") as bar:
        for name, windows in heldout.items():
            parts: list[_Measured] = []
            first = 0
            for group in windows.groups():
                reference: Tensor | None = None
                if name in known:
                    reference = known[name][:, first : first + len(group)]
                if base is decoder:
                    measured = _passes(decoder, gate, group, config, reference)
                else:
                    measured = _passes_of_two(decoder, base, gate, group, config, reference)
                parts.append(measured)
                if measured.difference is not None:
                    differences.append(measured.difference)
                first += len(group)
                bar.update(len(group))
            texts[name] = _figures(
                config.data.corpora[name].role,
                windows,
                closed=torch.cat([part.closed for part in parts]),
                nll=torch.cat([part.nll for part in parts], dim=1),
                base_tokens=decoder.output.base_columns,
            )
    return texts, max(differences, default=None)


@torch.no_grad()
def measure_windows(
    decoder: CausalDecoder,
    base: CausalDecoder,
    gate: FittedGate,
    windows: Windows,
    config: RunConfig,
) -> Tensor:
    """The nll of the targets by the base, by the model without its gate, and with it: [3, N, S], in
    fp64. The arguments are those of `measure`.
    """
    found: list[Tensor] = []
    with progress_bar("measuring kinds of text", len(windows), " sequences") as bar:
        for group in windows.groups():
            if base is decoder:
                measured = _passes(decoder, gate, group, config, None)
            else:
                measured = _passes_of_two(decoder, base, gate, group, config, None)
            found.append(measured.nll)
            bar.update(len(group))
    return torch.cat(found, dim=1)


class _Measured(NamedTuple):
    """What the passes over a group of windows gave.

    Attributes:
        closed: bool [N, S], where the gate is closed.
        nll: [3, N, S] in fp64, of the targets by the base, by the model without its gate, and with
            it.
        difference: the largest difference of a logit from the base's in the windows where the gate
            never opens; None if there is no such window, or the base is a model of its own.
    """

    closed: Tensor
    nll: Tensor
    difference: float | None


def _passes(
    decoder: CausalDecoder,
    gate: FittedGate,
    group: Windows,
    config: RunConfig,
    reference: Tensor | None,
) -> _Measured:
    """Runs the model with its gate; the base and the model without it where that is needed.

    reference: the `reference_nll` of the group, where it is known.
    """
    inputs, targets = decoder_inputs(group, config, decoder)
    decoder.gate = gate
    gated = decoder.hidden_states(*inputs)
    decoder.gate = None
    closed_rows = gated.open_tokens.closed
    assert closed_rows is not None, "it has a gate"
    # Padding counts as closed, whatever the gate decides there: nothing is predicted on it.
    closed = closed_rows.view(group.tokens.shape).cpu() | ~group.present
    never_opens = closed.all(dim=1, keepdim=True)
    rows = (never_opens & group.present).flatten().to(targets.device)

    base: HiddenStates | None = None
    difference = None
    if rows.any() or reference is None:
        base = base_states(decoder, inputs)
    if base is not None and rows.any():
        difference = _largest_difference(decoder, gated, base, rows)
    nll: list[Tensor] = []
    if reference is not None:
        nll.extend(reference.flatten(1).unbind())
    elif base is not None:
        nll.append(_nll(decoder, base, targets))
        nll.append(_nll(decoder, decoder.hidden_states(*inputs), targets))
    nll.append(_nll(decoder, gated, targets))
    return _Measured(closed, torch.stack(nll).view(3, *closed.shape), difference)


def _passes_of_two(
    decoder: CausalDecoder,
    base: CausalDecoder,
    gate: FittedGate,
    group: Windows,
    config: RunConfig,
    reference: Tensor | None,
) -> _Measured:
    """As `_passes`, where the base is a model of its own.

    An open token takes the logits of the trained model, a closed token those of the base.
    """
    inputs, _ = decoder_inputs(group, config, decoder)
    stream = base.base_stream(*inputs, layer=gate.layer)
    document_ids = None
    if inputs.documents is not None:
        document_ids = inputs.documents.ids
    is_open = gate.is_open(stream, document_ids) | gate.opens_id(inputs.tokens)
    closed = ~is_open.cpu() | ~group.present
    if reference is None:
        reference = _reference_nll(decoder, base, group, config)
    base_nll, trained_nll = reference
    gated_nll = torch.where(closed, base_nll, trained_nll)
    return _Measured(closed, torch.stack([base_nll, trained_nll, gated_nll]), None)


def base_states(base: CausalDecoder, inputs: TokenBatch) -> HiddenStates:
    """The base's hidden states. It gives no probability to new tokens, as where a gate is closed.

    base: a decoder that keeps the base, or the base itself.
    """
    if not base.keeps_base:
        return base.hidden_states(*inputs)
    hidden = base.hidden_states(*inputs, path="base")
    closed = torch.ones(len(hidden.x), 1, dtype=torch.bool, device=hidden.x.device)
    return replace(hidden, open_tokens=OpenTokens(none=True, closed=closed))


def _nll(model: CausalDecoder, hidden: HiddenStates, targets: Tensor) -> Tensor:
    """The nll of the targets, in fp64 on the CPU; 0 where nothing is predicted."""
    return model.output(hidden, targets).nll.double().cpu()


def _figures(
    role: str, windows: Windows, *, closed: Tensor, nll: Tensor, base_tokens: int
) -> HeldoutText:
    """The effect on the windows of a corpus.

    Args:
        role: the role of the corpus.
        windows: N windows of S tokens.
        closed: bool [N, S], where the gate is closed.
        nll: [3, N, S], by the base, by the model without its gate, and with it.
        base_tokens: the number of tokens of the base's vocabulary; new tokens have higher ids.
    """
    predicted = windows.targets != IGNORED
    base_nll, ungated_nll, gated_nll = nll
    # A new token after a closed token has the logit NEVER (-1e30), so its nll is about -NEVER. It
    # counts as impossible, not as a loss, of which it would be all.
    possible = predicted & (gated_nll < -NEVER / 2)
    cost = gated_nll - ungated_nll
    is_first = windows.positions < FIRST_TOKENS
    # The base has no rows for new tokens, so it has no perplexity on a text with some.
    is_new_token = torch.maximum(windows.tokens, windows.targets) >= base_tokens
    base_perplexity = None
    if not is_new_token.any():
        base_perplexity = _perplexity(base_nll[possible])
    tokens = int(windows.present.sum())
    return HeldoutText(
        role=role,
        sequences=len(windows),
        tokens=tokens,
        open_fraction=int((~closed).sum()) / max(1, tokens),
        closed_sequences=int(closed.all(dim=1).sum()),
        impossible_fraction=1 - int(possible.sum()) / max(1, int(predicted.sum())),
        cost_of_first_tokens=_finite(float(cost[possible & is_first].mean())),
        cost_of_later_tokens=_finite(float(cost[possible & ~is_first].mean())),
        base_perplexity=base_perplexity,
        ungated_perplexity=_perplexity(ungated_nll[possible]),
        gated_perplexity=_perplexity(gated_nll[possible]),
    )


def _perplexity(nll: Tensor) -> float | None:
    return _finite(perplexity(float(nll.mean())))


def _largest_difference(
    decoder: CausalDecoder, hidden: HiddenStates, base: HiddenStates, rows: Tensor
) -> float:
    """The largest difference of the logits of two passes over the same tokens.

    rows: bool [N], the tokens that count. The logits of all tokens are computed nevertheless: the
    rounding of a matrix product may depend on how many rows it has.
    """
    output = decoder.output
    differences: list[Tensor] = []
    for chunk in output.chunks(len(hidden.x)):
        difference = output.logits(hidden.rows(chunk)) - output.logits(base.rows(chunk))
        differences.append(difference.abs().amax(dim=-1)[rows[chunk]])
    # NaN counts as infinite: max() alone might pass it over.
    return float(torch.nan_to_num(torch.cat(differences), nan=math.inf).max())


def _finite(value: float) -> float | None:
    """None for what JSON cannot hold: no token was predicted, or a perplexity overflows."""
    return value if math.isfinite(value) else None
