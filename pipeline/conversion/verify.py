"""Verification of an exported folder: its logits on real text are compared with those of the model that trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.units import good_documents
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConversionError
from pipeline.gating.gate import FittedGate
from pipeline.hf.load import load_hf_model
from pipeline.hf.probe_texts import PROBE_TEXTS
from pipeline.hf.write import dtype_name
from pipeline.model.output import perplexity
from pipeline.scale_math import NEVER

DOCUMENTS = 4
TOKENS = 256
LOGITS = 2**26
"""The most logits of one text: 256 MiB in fp32. Large vocabularies get fewer documents."""

Probe = Mapping[str, list[Tensor]]
"""Token windows [S] of each text, by its name."""
MakeProbe = Callable[[TrainedModel], Probe]
"""Makes a probe with the model's own tokenizer."""


@dataclass(frozen=True)
class Difference:
    """Between two models' logits: the largest, and the mean Kullback-Leibler divergence in nats a token."""

    max_abs: float = 0.0
    kl: float = 0.0


# Both models are correct and still round differently, because they multiply in another order. How far that moves a
# logit depends on the model, so what rounding does to the training model itself is measured, and the export may differ
# by ROUNDINGS times as much. GRANTED is always allowed; in 16 bits the divergence alone decides.
GRANTED = {
    torch.float32: Difference(max_abs=1e-4, kl=1e-6),
    torch.float16: Difference(max_abs=math.inf, kl=1e-4),
    torch.bfloat16: Difference(max_abs=math.inf, kl=1e-4),
}
ROUNDINGS = 4
_MOST_BY_SCALE = 1e-3
_FINER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Comparison(Difference):
    """Two models on one text. `top1_agreement` is the share of tokens after which both rank the same token first."""

    tokens: int = 0
    top1_agreement: float = 1.0
    training_perplexity: float = math.nan
    exported_perplexity: float = math.nan


@dataclass(frozen=True)
class Report(Difference):
    """The contents of verification.json: the worst over all texts, and each text's own figures.

    `rounding` is the difference between the training model in `dtype` and in twice the precision, with the share of
    tokens on whose successor both agree; `scaling` between it
    and the model whose norms count added channels as the folder's do.
    """

    dtype: str = ""
    top1_agreement: float = 1.0
    rounding: Difference = Difference()
    rounding_top1_agreement: float = 1.0
    scaling: Difference = Difference()
    texts: Mapping[str, Comparison] = field(default_factory=dict)


def probe_maker(
    sources: Mapping[str, Sequence[str]], keys: Mapping[str, Keys] | None = None
) -> MakeProbe:
    """Makes the text to compare on: the beginnings of the first documents of each source (a list of files).

    Without sources it is the passages above. `keys` are those of sources whose texts are not under "text", or follow
    prompts. The function returned raises DataError if a source holds no document.
    """

    def make(model: TrainedModel) -> Probe:
        count = max(1, min(DOCUMENTS, LOGITS // (TOKENS * model.spec.vocab_size)))
        texts: dict[str, Iterable[str]] = {name: [text] for name, text in PROBE_TEXTS.items()}
        if sources:
            documents = {
                name: good_documents(files, (keys or {}).get(name, Keys()))
                for name, files in sources.items()
            }
            texts = {
                name: (one.whole_text for one in islice(found, count))
                for name, found in documents.items()
            }
        longest = model.spec.max_position_embeddings
        return {
            name: windows_of(of_source, model.tokenizer, longest)
            for name, of_source in texts.items()
        }

    return make


def windows_of(texts: Iterable[str], tokenizer: Path, length: int) -> list[Tensor]:
    """The first tokens of each text [S], at most `length` and TOKENS, by the tokenizer in a folder."""
    loaded = load_tokenizer(tokenizer)
    encoded = (loaded.reference.encode([text]).ids.tolist() for text in texts)
    return [torch.tensor([*loaded.before_document, *ids][: min(TOKENS, length)]) for ids in encoded]


@torch.no_grad()
def verify(
    model: TrainedModel,
    folder: Path,
    probe: Probe,
    dtype: torch.dtype,
    stored_scale: float | None = None,
) -> Report:
    """Compares the training model with what `transformers` makes of `folder`, both in `dtype`.

    Neither model is ever whole in memory: of the first there is one layer, the second is mapped from its files. A
    folder that stores added channels times `stored_scale` is compared with the training model whose norms count them
    so, and that with the training model itself.

    Raises ConversionError: they differ by more than rounding explains, or the scale changes the model noticeably.
    """
    windows = [window for of_text in probe.values() for window in of_text]
    gate = None
    if model.gate is not None:
        gate = _FixedGate(
            **{part.name: getattr(model.gate, part.name) for part in fields(FittedGate)}
        )
        model = replace(model, gate=gate)
    scaled = replace(model, stored_scale=stored_scale)
    expected, finer = scaled.logits(windows, dtype), scaled.logits(windows, _FINER[dtype])
    unscaled = expected if stored_scale is None else model.logits(windows, dtype)
    exported = load_hf_model(folder, dtype)
    if gate is not None:
        gate.fix_in(exported.token_gate, windows, str(folder))
    found = [exported(window.unsqueeze(0), use_cache=False).logits[0].float() for window in windows]

    def by_text(expected: list[Tensor], found: list[Tensor]) -> dict[str, Comparison]:
        pairs = iter(zip(expected, found, strict=True))
        return {
            name: compare(of_text, [next(pairs) for _ in of_text])
            for name, of_text in probe.items()
        }

    trained, texts = by_text(unscaled, expected), by_text(expected, found)
    rounded = by_text(finer, expected)
    rounding, scaling, worst = map(_worst, (rounded, trained, texts))
    for name, text in texts.items():
        texts[name] = replace(text, training_perplexity=trained[name].training_perplexity)
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
    if not scaling.kl <= max(_MOST_BY_SCALE, ROUNDINGS * rounding.kl):
        raise ConversionError(
            f"{folder}: the expansion stream is too large for an ordinary norm: counted times {stored_scale:g} it "
            f"changes the model by {scaling.kl:.3g} nats a token; use --format scale, or --dtype fp32 if it was another"
        )
    return report


@dataclass(frozen=True)
class _FixedGate(FittedGate):
    """A gate that takes the decisions of its first pass over a batch in all later ones; it keeps each pass's scores.

    Rounding may change the decision at a token whose score is near the threshold. Then two correct models differ by as
    much as the base from the trained model, there and at later tokens.
    """

    passes: list[Tensor] = field(default_factory=list)

    def is_open(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        self.passes.append(self.scores(x, document_ids))
        return self.passes[0] > self.threshold

    def fix_in(self, exported: nn.Module, windows: Sequence[Tensor], folder: str) -> None:
        """Makes the gate of an exported model take the same decisions in its next passes, one for each window [S].

        Such a pass raises ConversionError if the export would decide otherwise where no rounding explains it.
        """
        first, finer = self.passes[:2]
        rounding = (first - finer).abs().max()
        turns = iter(scores[: len(window)] for scores, window in zip(first, windows, strict=True))

        def replaced(module: nn.Module, inputs: Any, found: Tensor) -> Tensor:
            scores = next(turns)
            opens, far = scores > self.threshold, (scores - self.threshold).abs() > rounding
            if wrong := int((far & (opens != found[0, :, 0])).sum()):
                raise ConversionError(
                    f"{folder}: the exported gate decides otherwise than the trained model's on {wrong} of "
                    f"{len(opens)} tokens; not kept"
                )
            return opens.view(1, -1, 1)

        exported.register_forward_hook(replaced)


def describe(report: Report) -> str:
    """What was found, beside what rounding alone does to the model that trained: for the log."""
    rounding = report.rounding
    return (
        f"verified in {report.dtype}: largest logit difference {report.max_abs:.2g}, KL {report.kl:.2g}, "
        f"same likeliest token {100 * report.top1_agreement:.2f} %; rounding to {report.dtype} alone makes "
        f"{rounding.max_abs:.2g}, {rounding.kl:.2g} and {100 * report.rounding_top1_agreement:.2f} % "
        "in the model that trained"
    )


def check(report: Report, granted: Difference, folder: str) -> None:
    """Raises ConversionError if the two models differ by more than `granted` and by more than rounding explains."""
    max_abs = max(granted.max_abs, ROUNDINGS * report.rounding.max_abs)
    kl = max(granted.kl, ROUNDINGS * report.rounding.kl)
    if not (report.max_abs <= max_abs and report.kl <= kl):  # written so that a NaN fails
        raise ConversionError(
            f"{folder}: the exported model differs from the trained one by {report.max_abs:.3g} in a logit (at most "
            f"{max_abs:.3g}) and {report.kl:.3g} nats a token (at most {kl:.3g}); not kept"
        )


def compare(windows: list[Tensor], logits: list[tuple[Tensor, Tensor]]) -> Comparison:
    """The figures over all windows [S] of one text; the logits of the training and the exported model are [S, V].

    Perplexities leave out new pieces after a token that a gate closed, which have no probability.
    """
    tokens, targets = sum(map(len, windows)), 0
    max_abs = agreed = divergence = nll_expected = nll_found = 0.0
    for window, (trained, exported) in zip(windows, logits, strict=True):
        difference = float((trained.float() - exported.float()).abs().max())
        max_abs = max(max_abs, math.inf if math.isnan(difference) else difference)
        agreed += float((trained.argmax(-1) == exported.argmax(-1)).sum())
        p, q = F.log_softmax(trained.double(), dim=-1), F.log_softmax(exported.double(), dim=-1)
        divergence += float((p.exp() * (p - q)).sum())
        possible = p[:-1].gather(1, window[1:, None])[:, 0] > NEVER / 2
        nll_expected += float(F.nll_loss(p[:-1], window[1:], reduction="none")[possible].sum())
        nll_found += float(F.nll_loss(q[:-1], window[1:], reduction="none")[possible].sum())
        targets += int(possible.sum())
    return Comparison(
        max_abs,
        math.inf if math.isnan(divergence) else divergence / tokens,
        tokens,
        agreed / tokens,
        training_perplexity=perplexity(nll_expected / max(1, targets)),
        exported_perplexity=perplexity(nll_found / max(1, targets)),
    )


def _worst(texts: Mapping[str, Comparison]) -> Difference:
    return Difference(
        max(text.max_abs for text in texts.values()), max(text.kl for text in texts.values())
    )
