"""What a gate does to held-out text: how much of it opens, what that costs, and its perplexity with and without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.conversion.trained_model import TrainedModel
from pipeline.data.packing import IGNORED, Sample
from pipeline.data.samples import HeldoutSamples
from pipeline.gating.windows import Windows, as_windows
from pipeline.log import progress_bar
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder, Inputs, LogitsPath
from pipeline.model.from_hf import load_base
from pipeline.model.output import NEVER, HiddenStates, perplexity
from pipeline.scale.gate import CLOSED, OPEN, UNDECIDED, Gate
from pipeline.scale.gate_folder import FIRST_TOKENS, HeldoutText

_ROUNDS = 8
"""How often the gate's decisions are asked for again, after new pieces that could not follow were spelled out."""


@torch.no_grad()
def measure(
    decoder: Decoder,
    gate: Gate,
    heldout: Mapping[str, HeldoutSamples],
    config: RunConfig,
    spelling: Mapping[int, Sequence[int]] | None = None,
) -> tuple[dict[str, HeldoutText], float | None]:
    """The effect of `gate` on the first held-out samples, as many of each corpus as validation reads.

    And the largest difference of a logit from the base's where the gate never opens; None if it opens everywhere.

    `spelling`: the old pieces that each new one stands for. The base reads and predicts these instead. The gated model
    does where a closed token comes before, which no new piece can follow; perplexities stay those of a token as cut.
    """
    texts, differences = dict[str, HeldoutText](), list[float]()
    count = config.validation.max_sequences
    with progress_bar("measuring the gate", sum(min(count, len(one)) for one in heldout.values()), " sequences") as bar:
        for name, samples in heldout.items():
            windows = as_windows(list(islice(samples, count)), is_new=False)
            all_levels, all_nll, spelled_out = list[Tensor](), list[Tensor](), 0
            for group in windows.groups():
                inputs, targets = decoder_inputs(group, config, decoder)
                base = _base_states(decoder, inputs)
                decoder.gate = None
                ungated = decoder.hidden_states(*inputs)
                decoder.gate = gate
                gated = decoder.hidden_states(*inputs)
                levels = _levels(gated).view(group.tokens.shape).cpu()
                nll = [_nll(decoder, hidden, targets).view(levels.shape) for hidden in (base, ungated, gated)]
                if spelling:
                    is_new = group.tokens >= min(spelling), group.targets >= min(spelling)
                    nll[0] = _nll_spelled_out(decoder, group, config, spelling, *is_new, nll[0], path="base")
                    nll[2], replaced = _nll_as_possible(decoder, group, config, spelling, nll[2])
                    spelled_out += replaced
                # What the gate decides on padding is of no consequence: nothing is predicted there.
                closed = ((levels == CLOSED) | ~group.present).all(dim=1, keepdim=True)
                rows = (closed & group.present).flatten().to(targets.device)
                if rows.any():
                    differences.append(_largest_difference(decoder, gated, base, rows))
                all_levels.append(levels)
                all_nll.append(torch.stack(nll))
                bar.update(len(group))
            role = config.data.corpora[name].role
            texts[name] = _figures(role, windows, torch.cat(all_levels), torch.cat(all_nll, dim=1), spelled_out)
    return texts, max(differences, default=None)


def _figures(role: str, windows: Windows, levels: Tensor, nll: Tensor, spelled_out: int) -> HeldoutText:
    """levels: [N, S], nll: [3, N, S], those of the base, of the model without its gate, and with it."""
    predicted, is_first = windows.targets != IGNORED, windows.positions < FIRST_TOKENS
    of_tokens = levels[windows.present]
    base, ungated, gated = (_finite(perplexity(float(own[predicted].mean()))) for own in nll)
    first, later = (float((nll[2] - nll[1])[predicted & rows].mean()) for rows in (is_first, ~is_first))
    return HeldoutText(
        role=role,
        sequences=len(windows),
        tokens=len(of_tokens),
        open_fraction=int((of_tokens == OPEN).sum()) / max(1, len(of_tokens)),
        undecided_fraction=int((of_tokens == UNDECIDED).sum()) / max(1, len(of_tokens)),
        closed_sequences=int(((levels == CLOSED) | ~windows.present).all(dim=1).sum()),
        spelled_out_fraction=spelled_out / max(1, int(predicted.sum())),
        cost_of_first_tokens=_finite(first),
        cost_of_later_tokens=_finite(later),
        base_perplexity=base,
        ungated_perplexity=ungated,
        gated_perplexity=gated,
    )


def _base_states(decoder: Decoder, inputs: Inputs) -> HiddenStates:
    """The base's own states. It gives no new piece."""
    hidden = decoder.hidden_states(*inputs, path="base")
    return replace(hidden, closed=torch.ones(len(hidden.x), dtype=torch.bool, device=hidden.x.device))


def _nll(decoder: Decoder, hidden: HiddenStates, targets: Tensor) -> Tensor:
    """The nll of `targets` [N], in fp64 on the CPU."""
    return decoder.output(hidden, targets).nll.double().cpu()


def _levels(hidden: HiddenStates) -> Tensor:
    """What the gate made of each token [N]: CLOSED, UNDECIDED or OPEN."""
    assert hidden.closed is not None
    levels = torch.where(hidden.closed, CLOSED, OPEN)
    return levels if hidden.undecided is None else levels.masked_fill(hidden.undecided, UNDECIDED)


def _nll_spelled_out(
    decoder: Decoder,
    group: Windows,
    config: RunConfig,
    spelling: Mapping[int, Sequence[int]],
    tokens: Tensor,
    targets: Tensor,
    nll: Tensor,
    path: LogitsPath = "model",
) -> Tensor:
    """The nll [N, S] of each target of `group`, of which some are the old pieces that they stand for.

    Windows without any keep what they have in `nll`.
    """
    rows = (tokens | targets).any(1)
    if not rows.any():
        return nll
    spelled, columns = group.rows(rows).spelled_out(tokens[rows], targets[rows], spelling)
    inputs, flat = decoder_inputs(spelled, config, decoder)
    hidden = _base_states(decoder, inputs) if path == "base" else decoder.hidden_states(*inputs)
    parts = _nll(decoder, hidden, flat).view(columns.shape)
    return nll.index_put((rows,), torch.zeros_like(nll[rows]).scatter_add_(1, columns, parts))


def _nll_as_possible(
    decoder: Decoder, group: Windows, config: RunConfig, spelling: Mapping[int, Sequence[int]], nll: Tensor
) -> tuple[Tensor, int]:
    """The gated model's nll [N, S], given that of the text as cut, and how many new pieces had to be spelled out.

    What is spelled out changes what the gate reads. After some rounds every new piece of a window is.
    """
    impossible = replaced = nll > -NEVER / 2
    for left in reversed(range(_ROUNDS)):
        if not impossible.any():
            break
        whole = impossible.any(1, keepdim=True) & (group.targets >= min(spelling))
        replaced = replaced | (impossible if left else whole)
        read = F.pad(replaced[:, :-1], (1, 0)) & (
            group.document_ids == F.pad(group.document_ids[:, :-1], (1, 0), value=-1)
        )
        nll = _nll_spelled_out(decoder, group, config, spelling, read, replaced, nll)
        impossible = nll > -NEVER / 2
    return nll, int(replaced.sum())


@torch.no_grad()
def heldout_perplexities(
    model: TrainedModel, heldout: Mapping[str, HeldoutSamples], config: RunConfig
) -> dict[str, float]:
    """The perplexity of `model` on the first held-out samples, as many of each corpus as validation reads."""
    decoder = _loaded(model)
    return _perplexities(heldout, config, lambda group: _nll_of(decoder, group, config))


@torch.no_grad()
def chosen_perplexities(
    model: TrainedModel, gate: Gate, heldout: Mapping[str, HeldoutSamples], config: RunConfig
) -> dict[str, float]:
    """The same of the base and `model` beside each other: `model` for documents on which `gate` mostly opens."""
    decoder, base = _loaded(model), Decoder(model.base.spec)
    load_base(base, model.base)
    base = base.to(decoder.embedding.base.weight).eval()

    def nll(group: Windows) -> Tensor:
        inputs, _ = decoder_inputs(group, config, base)
        levels = gate.levels(base.base_stream(*inputs, layer=gate.layer), group.document_ids.to(inputs[0].device))
        chosen = group.mostly((levels == OPEN).cpu())
        return torch.where(chosen, _nll_of(decoder, group, config), _nll_of(base, group, config))

    return _perplexities(heldout, config, nll)


def _loaded(model: TrainedModel) -> Decoder:
    device = inference_device()
    return model.loaded(inference_dtype(model.base, device), device)


def _nll_of(decoder: Decoder, group: Windows, config: RunConfig) -> Tensor:
    """The nll of each target of `group` [N, S]."""
    inputs, targets = decoder_inputs(group, config, decoder)
    return _nll(decoder, decoder.hidden_states(*inputs), targets).view(group.tokens.shape)


def _perplexities(
    heldout: Mapping[str, HeldoutSamples], config: RunConfig, nll_of: Callable[[Windows], Tensor]
) -> dict[str, float]:
    def of(samples: Iterable[Sample]) -> float:
        groups = list(as_windows(list(samples), is_new=False).groups())
        predicted = sum(int((group.targets != IGNORED).sum()) for group in groups)
        return perplexity(sum(float(nll_of(group).sum()) for group in groups) / predicted) if predicted else math.inf

    return {name: of(islice(samples, config.validation.max_sequences)) for name, samples in heldout.items()}


def inference_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inference_dtype(base: BaseFolder, device: torch.device) -> torch.dtype:
    """The base's own type on a GPU; fp32 on a CPU, which is slow in 16 bits."""
    return base.dtype if device.type == "cuda" else torch.float32


def decoder_inputs(group: Windows, config: RunConfig, decoder: Decoder) -> tuple[Inputs, Tensor]:
    """Tokens and positions [B, S] and where documents lie, and the targets [B · S], where the decoder is."""
    device = decoder.embedding.base.weight.device
    documents = group.documents(device) if config.data.document_mask else None
    return (group.tokens.to(device), group.positions.to(device), documents), group.targets.flatten().to(device)


def _largest_difference(decoder: Decoder, hidden: HiddenStates, base: HiddenStates, rows: Tensor) -> float:
    """The largest difference of the logits of two passes over the same tokens, at the tokens `rows`: bool [N].

    All rows are multiplied: the rounding of a matrix product may depend on how many there are.
    """
    output = decoder.output
    differences = [
        (output.logits(hidden.rows(chunk)) - output.logits(base.rows(chunk))).abs().amax(dim=-1)[rows[chunk]]
        for chunk in output.chunks(len(hidden.x))
    ]
    return float(torch.nan_to_num(torch.cat(differences), nan=math.inf).max())


def _finite(value: float) -> float | None:
    """None for what JSON cannot hold: nothing was predicted, or a perplexity is beyond any float."""
    return value if math.isfinite(value) else None
