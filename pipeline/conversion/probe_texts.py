"""The texts on which an export is compared with the model that trained, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.hf.probe_texts import PROBE_TEXTS

DOCUMENTS = 4
"""The most documents of a source."""
TOKENS = 256
"""The most tokens of a document."""
LOGITS = 2**26
"""The most logits of one text: 256 MiB in fp32. Large vocabularies get fewer documents."""

Probe = Mapping[str, list[Tensor]]
"""Token windows [S] of each text, by its name."""
MakeProbe = Callable[[TrainedModel], Probe]
"""Makes a probe with the model's own tokenizer."""


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
