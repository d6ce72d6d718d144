"""What a gate does to held-out text: how much of it opens, what that costs, and its perplexity with and without it."""

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
from pipeline.model.decoder import Decoder
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.output import perplexity
from pipeline.model.paths import TokenBatch
from pipeline.scale_math import NEVER


@torch.no_grad()
def measure(
    decoder: Decoder, gate: FittedGate, heldout: Mapping[str, HeldoutSamples], config: RunConfig
) -> tuple[dict[str, HeldoutText], float | None]:
    """The effect of `gate` on the first held-out samples, as many of each corpus as validation reads.

    And the largest difference of a logit from the base's where the gate never opens; None if it opens everywhere.
    """
    texts, differences = dict[str, HeldoutText](), list[float]()
    count = config.validation.max_sequences
    with progress_bar(
        "measuring the gate", sum(min(count, len(one)) for one in heldout.values()), " sequences"
    ) as bar:
        for name, samples in heldout.items():
            windows = as_windows(list(islice(samples, count)), is_new=False)
            all_closed, all_nll = list[Tensor](), list[Tensor]()
            for group in windows.groups():
                inputs, targets = decoder_inputs(group, config, decoder)
                base = decoder.hidden_states(*inputs, path="base")
                decoder.gate = None
                ungated = decoder.hidden_states(*inputs)
                decoder.gate = gate
                gated = decoder.hidden_states(*inputs)
                assert gated.closed is not None, "it has a gate"
                base = replace(base, closed=torch.ones_like(gated.closed))  # it gives no new token
                # What the gate decides on padding is of no consequence: nothing is predicted there.
                closed = gated.closed.view(group.tokens.shape).cpu() | ~group.present
                rows = (
                    (closed.all(dim=1, keepdim=True) & group.present).flatten().to(targets.device)
                )
                if rows.any():
                    differences.append(_largest_difference(decoder, gated, base, rows))
                nll = [
                    decoder.output(hidden, targets).nll.double().cpu()
                    for hidden in (base, ungated, gated)
                ]
                all_closed.append(closed)
                all_nll.append(torch.stack(nll).view(3, *closed.shape))
                bar.update(len(group))
            figures = torch.cat(all_closed), torch.cat(all_nll, dim=1), decoder.output.base_columns
            texts[name] = _figures(config.data.corpora[name].role, windows, *figures)
    return texts, max(differences, default=None)


def _figures(
    role: str, windows: Windows, closed: Tensor, nll: Tensor, base_tokens: int
) -> HeldoutText:
    """closed: [N, S], nll: [3, N, S], those of the base, of the model without its gate, and with it."""
    predicted, is_first = windows.targets != IGNORED, windows.positions < FIRST_TOKENS
    possible = predicted & (nll[2] < -NEVER / 2)
    base, ungated, gated = (_finite(perplexity(float(own[possible].mean()))) for own in nll)
    has_new_tokens = bool((torch.maximum(windows.tokens, windows.targets) >= base_tokens).any())
    first, later = (
        float((nll[2] - nll[1])[possible & rows].mean()) for rows in (is_first, ~is_first)
    )
    tokens = int(windows.present.sum())
    return HeldoutText(
        role=role,
        sequences=len(windows),
        tokens=tokens,
        open_fraction=int((~closed).sum()) / max(1, tokens),
        closed_sequences=int(closed.all(dim=1).sum()),
        impossible_fraction=1 - int(possible.sum()) / max(1, int(predicted.sum())),
        cost_of_first_tokens=_finite(first),
        cost_of_later_tokens=_finite(later),
        base_perplexity=None if has_new_tokens else base,
        ungated_perplexity=ungated,
        gated_perplexity=gated,
    )


def loaded(model: TrainedModel) -> Decoder:
    """The model on a GPU in its base's type; without one on the CPU in fp32, as 16 bits are slow there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.loaded(model.base.dtype if device.type == "cuda" else torch.float32, device)


def decoder_inputs(
    group: Windows, config: RunConfig, decoder: Decoder
) -> tuple[TokenBatch, Tensor]:
    """Tokens and positions [B, S] and where documents lie, and the targets [B · S], where the decoder is."""
    device = decoder.embedding.base.weight.device
    documents = group.documents(device) if config.data.document_mask else None
    batch = TokenBatch(group.tokens.to(device), group.positions.to(device), documents)
    return batch, group.targets.flatten().to(device)


def _largest_difference(
    decoder: Decoder, hidden: HiddenStates, base: HiddenStates, rows: Tensor
) -> float:
    """The largest difference of the logits of two passes over the same tokens, at the tokens `rows`: bool [N].

    All rows are multiplied: the rounding of a matrix product may depend on how many there are.
    """
    output = decoder.output
    differences = [
        (output.logits(hidden.rows(chunk)) - output.logits(base.rows(chunk)))
        .abs()
        .amax(dim=-1)[rows[chunk]]
        for chunk in output.chunks(len(hidden.x))
    ]
    return float(torch.nan_to_num(torch.cat(differences), nan=math.inf).max())


def _finite(value: float) -> float | None:
    """None for what JSON cannot hold: nothing was predicted, or a perplexity is beyond any float."""
    return value if math.isfinite(value) else None
