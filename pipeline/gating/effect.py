"""What a gate does to held-out text: how much of it opens, what that costs, and its perplexity.

The perplexity is measured with the gate, without it, and with the base alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.run import RunConfig
from pipeline.data.dataset.packing import IGNORED
from pipeline.data.dataset.samples import HeldoutSamples
from pipeline.gating.folder import FIRST_TOKENS, HeldoutText
from pipeline.gating.gate import FittedGate
from pipeline.gating.windows import Windows, as_windows
from pipeline.log import progress_bar
from pipeline.model.bases import computed_dtype
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.output import perplexity
from pipeline.model.paths import TokenBatch
from pipeline.scale_math import NEVER


@torch.no_grad()
def measure(
    decoder: CausalDecoder,
    base: CausalDecoder,
    gate: FittedGate,
    heldout: Mapping[str, HeldoutSamples],
    config: RunConfig,
) -> tuple[dict[str, HeldoutText], float | None]:
    """The effect of `gate` on held-out samples: the first of each corpus, as many as in validation.

    Args:
        decoder: the trained model, without a gate.
        base: the base. It is `decoder` itself, except after full fine-tuning.
        gate: the gate to measure.
        heldout: the held-out samples of each corpus, by its name.
        config: the run.

    Returns:
        The effect on each corpus.
        The largest difference of a logit from the base's, in sequences on which the gate never
        opens. It is None if the gate opens in every sequence, and for full fine-tuning, where the
        base is a model of its own: its logits are compared when the export joins the two models.
    """
    count = config.validation.max_sequences
    total = sum(min(count, len(samples)) for samples in heldout.values())
    texts: dict[str, HeldoutText] = {}
    differences: list[float] = []
    with progress_bar("measuring the gate", total, " sequences") as bar:
        for name, samples in heldout.items():
            windows = as_windows(list(islice(samples, count)), is_new=False)
            all_closed: list[Tensor] = []
            all_nll: list[Tensor] = []
            for group in windows.groups():
                difference: float | None = None
                if base is decoder:
                    closed, nll, difference = _passes(decoder, gate, group, config)
                else:
                    closed, nll = _passes_of_two(decoder, base, gate, group, config)
                all_closed.append(closed)
                all_nll.append(nll)
                if difference is not None:
                    differences.append(difference)
                bar.update(len(group))
            texts[name] = _figures(
                config.data.corpora[name].role,
                windows,
                closed=torch.cat(all_closed),
                nll=torch.cat(all_nll, dim=1),
                base_tokens=decoder.output.base_columns,
            )
    return texts, max(differences, default=None)


def _passes(
    decoder: CausalDecoder, gate: FittedGate, group: Windows, config: RunConfig
) -> tuple[Tensor, Tensor, float | None]:
    """Runs the base, the model without its gate, and the model with it.

    Returns:
        Where the gate is closed: bool [N, S].
        The nll of the targets in the three passes: [3, N, S], in fp64.
        The largest difference of a logit from the base's in the windows where the gate never opens;
        None if there is no such window.
    """
    inputs, targets = decoder_inputs(group, config, decoder)
    base = decoder.hidden_states(*inputs, path="base")
    decoder.gate = None
    ungated = decoder.hidden_states(*inputs)
    decoder.gate = gate
    gated = decoder.hidden_states(*inputs)
    assert gated.closed is not None, "it has a gate"
    # The base's pass counts as closed everywhere: the base gives no probability to new tokens.
    base = replace(base, closed=torch.ones_like(gated.closed))

    # Padding counts as closed, whatever the gate decides there: nothing is predicted on it.
    closed = gated.closed.view(group.tokens.shape).cpu() | ~group.present
    never_opens = closed.all(dim=1, keepdim=True)
    rows = (never_opens & group.present).flatten().to(targets.device)
    difference = None
    if rows.any():
        difference = _largest_difference(decoder, gated, base, rows)

    nll: list[Tensor] = []
    for hidden in (base, ungated, gated):
        nll.append(decoder.output(hidden, targets).nll.double().cpu())
    return closed, torch.stack(nll).view(3, *closed.shape), difference


def _passes_of_two(
    decoder: CausalDecoder,
    base: CausalDecoder,
    gate: FittedGate,
    group: Windows,
    config: RunConfig,
) -> tuple[Tensor, Tensor]:
    """As `_passes`, where the base is a model of its own.

    An open token takes the logits of the trained model, a closed token those of the base.

    Returns:
        Where the gate is closed: bool [N, S].
        The nll of the targets by the base, by the trained model, and with the gate: [3, N, S], in
        fp64.
    """
    inputs, targets = decoder_inputs(group, config, decoder)
    stream = base.base_stream(*inputs, layer=gate.layer)
    document_ids = None
    if inputs.documents is not None:
        document_ids = inputs.documents.ids
    is_open = gate.is_open(stream, document_ids) | gate.opens_id(inputs.tokens)
    closed = ~is_open.cpu() | ~group.present
    nll: list[Tensor] = []
    for model in (base, decoder):
        found = model.output(model.hidden_states(*inputs), targets).nll
        nll.append(found.double().cpu().view(closed.shape))
    base_nll, trained_nll = nll
    gated_nll = torch.where(closed, base_nll, trained_nll)
    return closed, torch.stack([base_nll, trained_nll, gated_nll])


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


def loaded(model: TrainedModel) -> CausalDecoder:
    """The model on a GPU in its base's type; without a GPU in fp32 on the CPU.

    Matrix products in 16 bits are slow on CPUs.
    """
    if torch.cuda.is_available():
        return model.loaded(computed_dtype(model.base), torch.device("cuda"))
    return model.loaded(torch.float32, torch.device("cpu"))


def decoder_inputs(
    group: Windows, config: RunConfig, decoder: CausalDecoder
) -> tuple[TokenBatch, Tensor]:
    """The decoder's inputs, and the targets [B · S], on the decoder's device.

    The inputs are tokens [B, S], positions [B, S], and the bounds of documents unless
    `data.document_mask` is off.
    """
    device = decoder.device
    documents = None
    if config.data.document_mask:
        documents = group.documents(device)
    batch = TokenBatch(group.tokens.to(device), group.positions.to(device), documents)
    return batch, group.targets.flatten().to(device)


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
