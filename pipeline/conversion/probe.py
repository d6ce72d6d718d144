"""The text on which an exported model is compared with the model that it was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from pipeline.conversion.trained_model import TrainedModel
from pipeline.data.records import Keys
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.tokenizer_training import good_documents
from pipeline.errors import DataError

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
