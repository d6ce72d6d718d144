"""Verification of an exported folder: its logits on real text are compared with those of the
trained model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
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
Loader = Callable[[Path, torch.dtype], Any]
"""Loads an exported folder in a type, as its users do."""


@dataclass(frozen=True)
class LogitDifference:
    """The difference of two models' logits.

    Attributes:
        max_abs: the largest absolute difference of a logit.
        kl: the mean Kullback-Leibler divergence, in nats a token.
    """

    max_abs: float = 0.0
    kl: float = 0.0


# Two correct models round differently, because they multiply in another order. How far that moves a
# logit depends on the model. So the effect of rounding on the trained model itself is measured, and
# the export may differ by ROUNDINGS times as much. GRANTED is always allowed; in 16 bits only the
# divergence is checked.
GRANTED = {
    torch.float32: LogitDifference(max_abs=1e-4, kl=1e-6),
    torch.float16: LogitDifference(max_abs=math.inf, kl=1e-4),
    torch.bfloat16: LogitDifference(max_abs=math.inf, kl=1e-4),
}
ROUNDINGS = 4
_MOST_BY_SCALE = 1e-3
"""Nats a token by which counting the scaled channels in a mean square may change a model."""
FINER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Comparison(LogitDifference):
    """The comparison of two models on one text.

    Attributes:
        tokens: the number of tokens.
        top1_agreement: the share of tokens after which both rank the same token first.
        training_perplexity: of the trained model.
        exported_perplexity: of the export.
    """

    tokens: int = 0
    top1_agreement: float = 1.0
    training_perplexity: float = math.nan
    exported_perplexity: float = math.nan


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
    rounding: LogitDifference = LogitDifference()
    rounding_top1_agreement: float = 1.0
    scaling: LogitDifference = LogitDifference()
    texts: Mapping[str, Comparison] = field(default_factory=dict)


def probe_maker(
    sources: Mapping[str, Sequence[str]], keys: Mapping[str, Keys] | None = None
) -> MakeProbe:
    """A function that makes the texts to compare on: the first documents of each source.

    It raises DataError if a source holds no document.

    Args:
        sources: files by the name of the source; without any, the passages of `PROBE_TEXTS`.
        keys: of sources whose texts are in another field than "text", or follow prompts.
    """

    def make(model: TrainedModel) -> Probe:
        texts: dict[str, list[str]] = {name: [text] for name, text in PROBE_TEXTS.items()}
        if sources:
            texts = _first_documents(sources, keys or {}, model.spec.vocab_size)
        probe: dict[str, list[Tensor]] = {}
        for name, of_source in texts.items():
            longest = model.spec.max_position_embeddings
            probe[name] = windows_of(of_source, model.tokenizer, longest)
        return probe

    return make


def _first_documents(
    sources: Mapping[str, Sequence[str]], keys: Mapping[str, Keys], vocab_size: int
) -> dict[str, list[str]]:
    """The first documents of each source, fewer for a large vocabulary."""
    count = max(1, min(DOCUMENTS, LOGITS // (TOKENS * vocab_size)))
    texts: dict[str, list[str]] = {}
    for name, files in sources.items():
        documents = good_documents(files, keys.get(name, Keys()))
        first = islice(documents, count)
        texts[name] = [document.whole_text for document in first]
    return texts


def windows_of(texts: Iterable[str], tokenizer: Path, length: int) -> list[Tensor]:
    """The first tokens of each text, [S], with S at most `length` and TOKENS.

    tokenizer: the tokenizer's folder.
    """
    loaded = load_tokenizer(tokenizer)
    windows: list[Tensor] = []
    for text in texts:
        ids = [*loaded.before_document, *loaded.reference.encode([text]).ids.tolist()]
        windows.append(torch.tensor(ids[: min(TOKENS, length)]))
    return windows


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


def compare_texts(
    probe: Probe, trained: Sequence[Tensor], exported: Sequence[Tensor]
) -> dict[str, Comparison]:
    """The comparison on each text.

    trained, exported: the logits [S, V] of all windows, in the order of the probe.
    """
    comparisons: dict[str, Comparison] = {}
    first = 0
    for name, windows in probe.items():
        stop = first + len(windows)
        comparisons[name] = compare(windows, trained[first:stop], exported[first:stop])
        first = stop
    return comparisons


@dataclass(frozen=True)
class FixedGate(FittedGate):
    """A gate that repeats the decisions of its first pass in all later passes over the same batch.

    Rounding may change the decision at a token whose score is near the threshold. Then two correct
    models differ by as much as the base from the trained model, at this token and at later ones.

    Attributes:
        passes: the scores of each pass: [N, S].
    """

    passes: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, gate: FittedGate) -> FixedGate:
        """The same gate, without a pass."""
        return cls(
            layer=gate.layer,
            features=gate.features,
            mean=gate.mean,
            std=gate.std,
            weight=gate.weight,
            bias=gate.bias,
            open_ids=gate.open_ids,
            threshold=gate.threshold,
        )

    def is_open(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        self.passes.append(self.scores(x, document_ids))
        return self.passes[0] > self.threshold

    def fix_in(
        self, exported: nn.Module, windows: Sequence[Tensor], folder: str
    ) -> RemovableHandle:
        """Makes the gate of an exported model take the same decisions in its next passes.

        Such a pass raises ConversionError if the export would decide otherwise and rounding does
        not explain it.

        Args:
            exported: the module of the exported model's gate.
            windows: [S] each, the windows of the passes to come, in their order.
            folder: the export, for errors.

        Returns:
            A handle that ends it.
        """
        # Two passes of the trained model, in two precisions. Scores that are nearer to the
        # threshold than the passes differ may fall on either side of it.
        first = self.passes[0]
        rounding = (first - self.passes[1]).abs().max()
        expected: list[Tensor] = []
        for scores, window in zip(first, windows, strict=True):
            # Without the padding of the batch.
            expected.append(scores[: len(window)])
        remaining = iter(expected)

        def replaced(module: nn.Module, inputs: Any, found: Tensor) -> Tensor:
            scores = next(remaining)
            opens = scores > self.threshold
            is_far = (scores - self.threshold).abs() > rounding
            wrong = int((is_far & (opens != found[0, :, 0])).sum())
            if wrong:
                raise ConversionError(
                    f"{folder}: the exported gate decides otherwise than the trained model's on "
                    f"{wrong} of {len(opens)} tokens; not kept"
                )
            return opens.view(1, -1, 1)

        return exported.register_forward_hook(replaced)


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


def compare(
    windows: Sequence[Tensor], trained: Sequence[Tensor], exported: Sequence[Tensor]
) -> Comparison:
    """The comparison of two models on the windows of one text.

    Perplexities leave out new tokens after a closed token, whose probability is zero.

    Args:
        windows: the tokens of each window, [S].
        trained: the logits of the trained model on each window, [S, V].
        exported: likewise of the export.
    """
    tokens = 0
    targets = 0
    max_abs = 0.0
    agreed = 0
    divergence = 0.0
    nll_trained = 0.0
    nll_exported = 0.0
    for window, z_trained, z_exported in zip(windows, trained, exported, strict=True):
        tokens += len(window)
        difference = float((z_trained.float() - z_exported.float()).abs().max())
        if math.isnan(difference):
            # max() would pass over a NaN, which compares as neither larger nor smaller.
            difference = math.inf
        max_abs = max(max_abs, difference)
        agreed += int((z_trained.argmax(-1) == z_exported.argmax(-1)).sum())
        # In fp64: KL sums differences of nearly equal numbers over the vocabulary.
        p = F.log_softmax(z_trained.double(), dim=-1)
        q = F.log_softmax(z_exported.double(), dim=-1)
        divergence += float((p.exp() * (p - q)).sum())
        # The logits at a token predict the next one, so that the last logits have no target.
        following = window[1:]
        is_possible = p[:-1].gather(1, following[:, None])[:, 0] > NEVER / 2
        targets += int(is_possible.sum())
        nll_trained += float(F.nll_loss(p[:-1], following, reduction="none")[is_possible].sum())
        nll_exported += float(F.nll_loss(q[:-1], following, reduction="none")[is_possible].sum())
    if math.isnan(divergence):
        divergence = math.inf
    return Comparison(
        max_abs=max_abs,
        kl=divergence / tokens,
        tokens=tokens,
        top1_agreement=agreed / tokens,
        training_perplexity=perplexity(nll_trained / max(1, targets)),
        exported_perplexity=perplexity(nll_exported / max(1, targets)),
    )


def worst_of(texts: Mapping[str, Comparison]) -> LogitDifference:
    """The largest of each figure over all texts."""
    max_abs = max(text.max_abs for text in texts.values())
    kl = max(text.kl for text in texts.values())
    return LogitDifference(max_abs, kl)
