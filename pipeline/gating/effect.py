"""What a gate does to held-out text: how much of it opens, and its perplexity under base, trained and gated model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.conversion.trained_model import TrainedModel
from pipeline.data.packing import IGNORED
from pipeline.data.samples import HeldoutSamples
from pipeline.gating.states import GROUP_TOKENS, inference_dtype
from pipeline.gating.windows import Windows, as_windows
from pipeline.log import progress_bar
from pipeline.model.decoder import Decoder, LogitsPath
from pipeline.model.output import HiddenStates, perplexity
from pipeline.scale.gate_folder import HeldoutText


@dataclass(frozen=True)
class Effect:
    """The gate's effect on each held-out corpus; the difference is None if the gate opens in every sequence."""

    heldout: Mapping[str, HeldoutText]
    closed_max_abs_logit_difference: float | None


@dataclass
class _Sums:
    tokens: int = 0
    open: int = 0
    closed_sequences: int = 0
    predicted: int = 0
    nll: dict[str, float] = field(default_factory=lambda: {"base": 0.0, "ungated": 0.0, "gated": 0.0})


@torch.no_grad()
def measure(model: TrainedModel, heldout: Mapping[str, HeldoutSamples], config: RunConfig) -> Effect:
    """The effect of the gate of `model` on the first held-out samples, as many of each corpus as validation reads."""
    if model.gate is None:
        raise ValueError(f"{model.checkpoint}: has no gate")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = inference_dtype(model.base, device)
    gated = _Streamed(model, dtype, device)
    ungated = _Streamed(replace(model, gate=None), dtype, device)
    count = config.validation.max_sequences
    largest: list[float] = []
    texts = {}
    total = sum(min(count, len(samples)) for samples in heldout.values())
    with progress_bar("measuring the gate", total, " sequences") as bar:
        for name, samples in heldout.items():
            windows, sums = as_windows(list(islice(samples, count)), is_new=False), _Sums()
            for group in windows.groups(GROUP_TOKENS):
                inputs = _Inputs(group, config.data.document_mask, device)
                states = gated.hidden(inputs), ungated.hidden(inputs), gated.hidden(inputs, "base")
                for kind, hidden in zip(("gated", "ungated", "base"), states, strict=True):
                    sums.nll[kind] += float(gated.nll(hidden, inputs).double().sum())
                is_open = gated.open_tokens(inputs) & group.present
                sums.tokens += int(group.present.sum())
                sums.open += int(is_open.sum())
                sums.predicted += int((group.targets != IGNORED).sum())
                shut = ~is_open.any(dim=1)
                sums.closed_sequences += int(shut.sum())
                if shut.any():
                    # What the gate decides on padding is of no consequence: nothing is predicted there.
                    rows = (shut.unsqueeze(1) & group.present).flatten()
                    largest.append(gated.largest_difference(states[0], states[2], rows))
                bar.update(len(group))
            texts[name] = _text(sums, config.data.corpora[name].role, len(windows))
    return Effect(texts, max(largest, default=None))


@torch.no_grad()
def heldout_perplexities(
    model: TrainedModel, heldout: Mapping[str, HeldoutSamples], config: RunConfig
) -> dict[str, float]:
    """The perplexity of `model` on the first held-out samples, as many of each corpus as validation reads."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    streamed = _Streamed(model, inference_dtype(model.base, device), device)
    perplexities = {}
    for name, samples in heldout.items():
        nll, predicted = 0.0, 0
        windows = as_windows(list(islice(samples, config.validation.max_sequences)), is_new=False)
        for group in windows.groups(GROUP_TOKENS):
            inputs = _Inputs(group, config.data.document_mask, device)
            nll += float(streamed.nll(streamed.hidden(inputs), inputs).double().sum())
            predicted += int((group.targets != IGNORED).sum())
        perplexities[name] = perplexity(nll / predicted) if predicted else math.inf
    return perplexities


def _text(sums: _Sums, role: str, sequences: int) -> HeldoutText:
    return HeldoutText(
        role=role,
        sequences=sequences,
        tokens=sums.tokens,
        open_fraction=sums.open / max(1, sums.tokens),
        closed_sequences=sums.closed_sequences,
        **{f"{kind}_perplexity": _perplexity(nll, sums.predicted) for kind, nll in sums.nll.items()},
    )


def _perplexity(nll: float, predicted: int) -> float | None:
    """exp(nll per token); None if there is none, or it is beyond any float, which JSON cannot hold."""
    value = perplexity(nll / predicted) if predicted else math.inf
    return None if math.isinf(value) else value


class _Inputs:
    """The decoder's inputs of a group of windows, each [B, S], on a device."""

    def __init__(self, group: Windows, document_mask: bool, device: torch.device) -> None:
        self.tokens, self.positions, self.targets = (
            tensor.to(device) for tensor in (group.tokens, group.positions, group.targets)
        )
        self.documents = group.documents(device) if document_mask else None


class _Streamed:
    """A trained model of which at most one module is in memory."""

    def __init__(self, model: TrainedModel, dtype: torch.dtype, device: torch.device) -> None:
        self.gate = model.gate
        self.decoder: Decoder
        self.decoder, self._fill_output = model.streamed(dtype, device)

    def hidden(self, inputs: _Inputs, path: LogitsPath = "model") -> HiddenStates:
        return self.decoder.hidden_states(inputs.tokens, inputs.positions, inputs.documents, path=path)

    def nll(self, hidden: HiddenStates, inputs: _Inputs) -> Tensor:
        """[B · S]; zero where nothing is predicted."""
        losses: Tensor = self.decoder.output(hidden, inputs.targets.flatten()).nll
        return losses

    def open_tokens(self, inputs: _Inputs) -> Tensor:
        """bool [B, S], on the CPU."""
        if self.gate is None:
            raise ValueError("there is no gate to decide")
        stream = self.decoder.base_stream(inputs.tokens, inputs.positions, inputs.documents, layer=self.gate.layer)
        return self.gate.open_tokens(stream, inputs.documents.ids if inputs.documents else None).cpu()

    def largest_difference(self, hidden: HiddenStates, base: HiddenStates, rows: Tensor) -> float:
        """The largest difference of the logits of two passes over the same tokens, at the tokens `rows`: bool [N].

        All rows are multiplied: the rounding of a matrix product may depend on how many there are.
        """
        self._fill_output()
        differences = [
            (first - second).abs().amax(dim=-1)[rows[chunk].to(first.device)]
            for chunk, first, second in self._logit_chunks(hidden, base)
        ]
        self.decoder.output.to("meta")
        return float(torch.nan_to_num(torch.cat(differences), nan=math.inf).max())

    def _logit_chunks(self, hidden: HiddenStates, base: HiddenStates) -> Iterator[tuple[slice, Tensor, Tensor]]:
        output = self.decoder.output
        for chunk in output.chunks(len(hidden.x)):
            yield chunk, output.logits(hidden.rows(chunk)), output.logits(base.rows(chunk))
