"""What a gate does to held-out text: how much of it opens, what that costs, and its perplexity with and without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from pipeline.model.attention import Documents
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder, LogitsPath
from pipeline.model.output import NEVER, HiddenStates, perplexity
from pipeline.scale.gate import CLOSED, OPEN, UNDECIDED, Gate
from pipeline.scale.gate_folder import FIRST_TOKENS, HeldoutText

_MODELS = ("base", "ungated", "gated")
_PLACES = ("first", "later")
_ROUNDS = 8
"""How often the gate's decisions are asked for again, after new pieces that could not follow were spelled out."""


@dataclass(frozen=True)
class Effect:
    """The gate's effect on each held-out corpus; the difference is None if the gate opens in every sequence."""

    heldout: Mapping[str, HeldoutText]
    closed_max_abs_logit_difference: float | None


@dataclass
class _Sums:
    tokens: int = 0
    spelled_out: int = 0
    open: int = 0
    undecided: int = 0
    closed_sequences: int = 0
    predicted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_PLACES, 0))
    nll: dict[tuple[str, str], float] = field(default_factory=lambda: {(m, p): 0.0 for m in _MODELS for p in _PLACES})

    def text(self, role: str, sequences: int) -> HeldoutText:
        def cost(place: str) -> float | None:
            lost = self.nll["gated", place] - self.nll["ungated", place]
            return lost / self.predicted[place] if self.predicted[place] else None

        total = {model: sum(self.nll[model, place] for place in _PLACES) for model in _MODELS}
        predicted = sum(self.predicted.values())
        return HeldoutText(
            role=role,
            sequences=sequences,
            tokens=self.tokens,
            open_fraction=self.open / max(1, self.tokens),
            undecided_fraction=self.undecided / max(1, self.tokens),
            closed_sequences=self.closed_sequences,
            spelled_out_fraction=self.spelled_out / max(1, predicted),
            cost_of_first_tokens=cost("first"),
            cost_of_later_tokens=cost("later"),
            **{f"{model}_perplexity": _finite(total[model], predicted) for model in _MODELS},
        )


@torch.no_grad()
def measure(
    decoder: Decoder,
    gate: Gate,
    heldout: Mapping[str, HeldoutSamples],
    config: RunConfig,
    spelling: Mapping[int, Sequence[int]] | None = None,
) -> Effect:
    """The effect of `gate` on the first held-out samples, as many of each corpus as validation reads.

    `spelling`: the old pieces that each new one stands for. The base reads and predicts these instead. The gated model
    does where a closed token comes before, which no new piece can follow; perplexities stay those of a token as cut.
    """
    largest: list[float] = []
    texts = {}
    count = config.validation.max_sequences
    with progress_bar("measuring the gate", sum(min(count, len(one)) for one in heldout.values()), " sequences") as bar:
        for name, samples in heldout.items():
            windows, sums = as_windows(list(islice(samples, count)), is_new=False), _Sums()
            for group in windows.groups():
                inputs, targets = decoder_inputs(group, config, decoder)
                decoder.gate = None
                states = {
                    "ungated": decoder.hidden_states(*inputs),
                    "base": decoder.hidden_states(*inputs, path="base"),
                }
                stream = decoder.base_stream(*inputs, layer=gate.layer)
                decoder.gate = gate
                states["gated"] = decoder.hidden_states(*inputs)
                present, is_first = group.targets != IGNORED, group.positions < FIRST_TOKENS
                places = {"first": present & is_first, "later": present & ~is_first}
                nll = {
                    model: decoder.output(hidden, targets).nll.double().view(present.shape).cpu()
                    for model, hidden in states.items()
                }
                if spelling:
                    is_new = group.tokens >= min(spelling), group.targets >= min(spelling)
                    nll["base"] = _nll_spelled_out(decoder, group, config, spelling, *is_new, path="base")
                    nll["gated"], replaced = _nll_as_possible(decoder, group, config, spelling, nll["gated"])
                    sums.spelled_out += replaced
                for place, rows in places.items():
                    sums.predicted[place] += int(rows.sum())
                    for model in _MODELS:
                        sums.nll[model, place] += float(nll[model][rows].sum())
                levels = decoder.gate_levels(gate, stream, inputs[0], inputs[2].ids if inputs[2] else None).cpu()
                sums.tokens += int(group.present.sum())
                sums.open += int((group.present & (levels == OPEN)).sum())
                sums.undecided += int((group.present & (levels == UNDECIDED)).sum())
                shut = ((levels == CLOSED) | ~group.present).all(dim=1)
                sums.closed_sequences += int(shut.sum())
                # What the gate decides on padding is of no consequence: nothing is predicted there.
                rows = (shut.unsqueeze(1) & group.present).flatten().to(targets.device)
                if rows.any():
                    base = replace(states["base"], closed=torch.ones_like(rows))
                    largest.append(_largest_difference(decoder, states["gated"], base, rows))
                bar.update(len(group))
            texts[name] = sums.text(config.data.corpora[name].role, len(windows))
    return Effect(texts, max(largest, default=None))


def _nll_spelled_out(
    decoder: Decoder,
    group: Windows,
    config: RunConfig,
    spelling: Mapping[int, Sequence[int]],
    tokens: Tensor,
    targets: Tensor,
    path: LogitsPath = "model",
) -> Tensor:
    """The nll [N, S] of each target of `group`, of which some are the old pieces that they stand for."""
    spelled, columns = group.spelled_out(tokens, targets, spelling)
    inputs, flat = decoder_inputs(spelled, config, decoder)
    hidden = decoder.hidden_states(*inputs, path=path)
    if path == "base":
        hidden = replace(hidden, closed=torch.ones_like(flat, dtype=torch.bool))
    nll = decoder.output(hidden, flat).nll.double().view(columns.shape).cpu()
    return torch.zeros(group.tokens.shape, dtype=nll.dtype).scatter_add_(1, columns, nll)


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
        nll = _nll_spelled_out(decoder, group, config, spelling, read, replaced)
        impossible = nll > -NEVER / 2
    return nll, int(replaced.sum())


@torch.no_grad()
def heldout_perplexities(
    model: TrainedModel, heldout: Mapping[str, HeldoutSamples], config: RunConfig
) -> dict[str, float]:
    """The perplexity of `model` on the first held-out samples, as many of each corpus as validation reads."""
    device = inference_device()
    decoder = model.loaded(inference_dtype(model.base, device), device)

    def of(samples: Iterable[Sample]) -> float:
        nll, predicted = 0.0, 0
        for group in as_windows(list(samples), is_new=False).groups():
            inputs, targets = decoder_inputs(group, config, decoder)
            nll += float(decoder.output(decoder.hidden_states(*inputs), targets).nll.double().sum())
            predicted += int((targets != IGNORED).sum())
        return perplexity(nll / predicted) if predicted else math.inf

    return {name: of(islice(samples, config.validation.max_sequences)) for name, samples in heldout.items()}


def inference_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inference_dtype(base: BaseFolder, device: torch.device) -> torch.dtype:
    """The base's own type on a GPU; fp32 on a CPU, which is slow in 16 bits."""
    return base.dtype if device.type == "cuda" else torch.float32


def decoder_inputs(
    group: Windows, config: RunConfig, decoder: Decoder
) -> tuple[tuple[Tensor, Tensor, Documents | None], Tensor]:
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


def _finite(nll: float, predicted: int) -> float | None:
    """The perplexity; None if nothing is predicted, or it is beyond any float, which JSON cannot hold."""
    value = perplexity(nll / predicted) if predicted else math.inf
    return None if math.isinf(value) else value
