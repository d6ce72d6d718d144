"""What a gate does to held-out text: how much of it opens, what that costs, and its perplexity with and without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.conversion.trained_model import TrainedModel
from pipeline.data.packing import IGNORED, Sample
from pipeline.data.samples import HeldoutSamples
from pipeline.gating.windows import Windows, as_windows
from pipeline.log import progress_bar
from pipeline.model.attention import Documents
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.output import HiddenStates, perplexity
from pipeline.scale.gate import CLOSED, OPEN, UNDECIDED, Gate
from pipeline.scale.gate_folder import FIRST_TOKENS, HeldoutText

_MODELS = ("base", "ungated", "gated")
_PLACES = ("first", "later")


@dataclass(frozen=True)
class Effect:
    """The gate's effect on each held-out corpus; the difference is None if the gate opens in every sequence."""

    heldout: Mapping[str, HeldoutText]
    closed_max_abs_logit_difference: float | None


@dataclass
class _Sums:
    tokens: int = 0
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
            cost_of_first_tokens=cost("first"),
            cost_of_later_tokens=cost("later"),
            **{f"{model}_perplexity": _finite(total[model], predicted) for model in _MODELS},
        )


@torch.no_grad()
def measure(decoder: Decoder, gate: Gate, heldout: Mapping[str, HeldoutSamples], config: RunConfig) -> Effect:
    """The effect of `gate` on the first held-out samples, as many of each corpus as validation reads."""
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
                present = targets != IGNORED
                is_first = (group.positions < FIRST_TOKENS).flatten().to(present.device)
                places = {"first": present & is_first, "later": present & ~is_first}
                for model, hidden in states.items():
                    nll = decoder.output(hidden, targets).nll.double()
                    for place, rows in places.items():
                        sums.nll[model, place] += float(nll[rows].sum())
                for place, rows in places.items():
                    sums.predicted[place] += int(rows.sum())
                levels = gate.levels(stream, inputs[2].ids if inputs[2] else None).cpu()
                sums.tokens += int(group.present.sum())
                sums.open += int((group.present & (levels == OPEN)).sum())
                sums.undecided += int((group.present & (levels == UNDECIDED)).sum())
                shut = ((levels == CLOSED) | ~group.present).all(dim=1)
                sums.closed_sequences += int(shut.sum())
                # What the gate decides on padding is of no consequence: nothing is predicted there.
                rows = (shut.unsqueeze(1) & group.present).flatten().to(present.device)
                if rows.any():
                    largest.append(_largest_difference(decoder, states["gated"], states["base"], rows))
                bar.update(len(group))
            texts[name] = sums.text(config.data.corpora[name].role, len(windows))
    return Effect(texts, max(largest, default=None))


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
