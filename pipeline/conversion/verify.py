"""Is the exported folder the model that trained? Both compute logits on real text; a report says how they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.conversion.hf_folder import load_exported
from pipeline.conversion.trained_model import StreamedDecoder, TrainedModel
from pipeline.data.records import Keys
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.units import good_documents
from pipeline.errors import ConversionError, DataError

# --- The text on which an exported model is compared with the model that it was made of -----------------------------

# Article 1 and the preamble's first sentence of the Universal Declaration of Human Rights.
BUILT_IN = {
    "english": (
        "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience "
        "and should act towards one another in a spirit of brotherhood. Whereas recognition of the inherent dignity "
        "and of the equal and inalienable rights of all members of the human family is the foundation of freedom, "
        "justice and peace in the world."
    ),
    "korean": (
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. "
        "인간은 천부적으로 이성과 양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다. "
        "모든 인류 구성원의 천부의 존엄성과 동등하고 양도할 수 없는 권리를 인정하는 것이 "
        "세계의 자유, 정의 및 평화의 기초이다."
    ),
}
DOCUMENTS = 4
TOKENS = 256
LOGITS = 2**26
"""What one text's logits may come to: 256 MiB in fp32. Large vocabularies get fewer documents."""

Probe = Mapping[str, list[Tensor]]
"""Token windows [S] of each text, by its name."""


def probe_maker(
    sources: Mapping[str, Sequence[str]], keys: Mapping[str, Keys] | None = None
) -> Callable[[TrainedModel], Probe]:
    """The beginnings of the first documents of each source (a list of files), or without one of the passages above.

    `keys` are those of sources whose texts lie elsewhere than under "text", or stand behind prompts.
    """

    def make(model: TrainedModel) -> Probe:
        tokenizer = load_tokenizer(model.base.path)
        context = min(TOKENS, model.spec.max_position_embeddings)
        count = max(1, min(DOCUMENTS, LOGITS // (context * model.spec.vocab_size)))
        documents: dict[str, Iterable[str]] = {name: [text] for name, text in BUILT_IN.items()}
        if sources:
            documents = {
                name: (one.whole_text for one in islice(good_documents(files, (keys or {}).get(name, Keys())), count))
                for name, files in sources.items()
            }
        probe = {name: _windows(found, tokenizer, context) for name, found in documents.items()}
        if empty := [name for name, windows in probe.items() if not windows]:
            raise DataError(f"{empty[0]}: holds no document to verify on; name other files with --text")
        return probe

    return make


def _windows(documents: Iterable[str], tokenizer: Tokenizer, length: int) -> list[Tensor]:
    first = list(tokenizer.document_start or tokenizer.document_end)
    encoded = (first + tokenizer.reference.encode([text]).ids.tolist() for text in documents)
    return [torch.tensor(ids[:length]) for ids in encoded if len(ids) > 1]


# --- Is the exported folder the model that trained? Both compute  ---


@dataclass(frozen=True)
class Difference:
    """Of two models' logits: the largest, and the mean Kullback-Leibler divergence in nats a token."""

    max_abs: float = 0.0
    kl: float = 0.0

    def worse(self, other: Difference) -> Difference:
        """The larger of each figure."""
        return Difference(max(self.max_abs, other.max_abs), max(self.kl, other.kl))


# The two models multiply in another order, and round otherwise. How much that may move a logit depends on the model; so
# what rounding does to the training model itself is measured, and the export may differ by a few times as much. These
# differences are always granted; in 16 bits the divergence alone decides.
GRANTED = {
    torch.float32: Difference(max_abs=1e-4, kl=1e-6),
    torch.float16: Difference(max_abs=math.inf, kl=1e-4),
    torch.bfloat16: Difference(max_abs=math.inf, kl=1e-4),
}
ROUNDINGS = 4
_FINER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass
class Comparison:
    """Two models on one text. `top1_agreement` is the share of tokens after which both find the same one likeliest."""

    tokens: int = 0
    max_abs: float = 0.0
    kl: float = 0.0
    top1_agreement: float = 0.0
    training_perplexity: float = 0.0
    exported_perplexity: float = 0.0


@dataclass
class Report:
    """The contents of verification.json: the worst over all texts, and each text's own figures.

    `rounding` is what the type does to the training model itself, compared with twice the precision.
    """

    dtype: str
    max_abs: float = 0.0
    kl: float = 0.0
    top1_agreement: float = 1.0
    rounding: Difference = field(default_factory=Difference)
    texts: dict[str, Comparison] = field(default_factory=dict)

    def add(self, name: str, comparison: Comparison, rounding: Difference) -> None:
        """Counts the text `name` in."""
        self.texts[name] = comparison
        self.max_abs = max(self.max_abs, comparison.max_abs)
        self.kl = max(self.kl, comparison.kl)
        self.top1_agreement = min(self.top1_agreement, comparison.top1_agreement)
        self.rounding = self.rounding.worse(rounding)

    def as_json(self) -> dict[str, Any]:
        """For `write_json`."""
        return asdict(self)


@torch.no_grad()
def verify(model: TrainedModel, folder: Path, probe: Probe, dtype: torch.dtype) -> Report:
    """Compares the training model with what `transformers` makes of `folder`, both in the type that it is written in.

    Adapters alone go through PEFT. Neither model is ever whole in memory: of the one a layer is, and the other is
    mapped from its files.

    Raises:
        ConversionError: they are further apart than rounding explains.
    """
    windows = [window for windows in probe.values() for window in windows]
    finer = iter(StreamedDecoder(model, _FINER[dtype]).logits(windows))
    training = iter(StreamedDecoder(model, dtype).logits(windows))
    exported = load_exported(folder, model.base.path, dtype)
    report = Report(str(dtype).removeprefix("torch."))
    for name, of_text in probe.items():
        expected = [next(training) for _ in of_text]
        found = [exported(window.unsqueeze(0), use_cache=False).logits[0].float() for window in of_text]
        rounding = compare(of_text, [next(finer) for _ in of_text], expected)
        report.add(name, compare(of_text, expected, found), Difference(rounding.max_abs, rounding.kl))
    check(report, GRANTED[dtype], str(folder))
    return report


def check(report: Report, granted: Difference, folder: str) -> None:
    """Raises ConversionError where the two models differ by more than is granted, and than rounding explains."""
    allowed = granted.worse(Difference(ROUNDINGS * report.rounding.max_abs, ROUNDINGS * report.rounding.kl))
    # Written so that a NaN fails.
    if not (report.max_abs <= allowed.max_abs and report.kl <= allowed.kl):
        raise ConversionError(
            f"{folder}: the exported model differs from the trained one by {report.max_abs:.3g} in a logit (at most "
            f"{allowed.max_abs:.3g}) and {report.kl:.3g} nats a token (at most {allowed.kl:.3g}); not kept"
        )


def compare(windows: list[Tensor], expected: list[Tensor], found: list[Tensor]) -> Comparison:
    """The figures over all windows of one text; logits are [S, V]."""
    comparison = Comparison(tokens=sum(len(window) for window in windows))
    agreed, divergence, nll_expected, nll_found, targets = 0.0, 0.0, 0.0, 0.0, 0
    for window, mine, theirs in zip(windows, expected, found, strict=True):
        difference = float((mine.float() - theirs.float()).abs().max())
        comparison.max_abs = max(comparison.max_abs, math.inf if math.isnan(difference) else difference)
        agreed += float((mine.argmax(-1) == theirs.argmax(-1)).sum())
        p, q = F.log_softmax(mine.double(), dim=-1), F.log_softmax(theirs.double(), dim=-1)
        divergence += float((p.exp() * (p - q)).sum())
        nll_expected += float(F.nll_loss(p[:-1], window[1:], reduction="sum"))
        nll_found += float(F.nll_loss(q[:-1], window[1:], reduction="sum"))
        targets += len(window) - 1
    comparison.kl = math.inf if math.isnan(divergence) else divergence / comparison.tokens
    comparison.top1_agreement = agreed / comparison.tokens
    comparison.training_perplexity = math.exp(nll_expected / targets)
    comparison.exported_perplexity = math.exp(nll_found / targets)
    return comparison
