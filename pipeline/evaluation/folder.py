"""Scoring a Hugging Face folder on corpora."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline import log
from pipeline.conversion.hf_model import load_hf_model
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConfigError
from pipeline.evaluation.perplexity import Limits, Score, Text, score

# Longer windows are asked for by --context: their logits take gigabytes where the vocabulary is large.
DEFAULT_CONTEXT = 4096
_logger = log.get_logger(__name__)


def score_folder(
    folder: Path,
    corpora: Mapping[str, Iterable[Text]],
    *,
    context: int | None = None,
    stride: int | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Score]:
    """The score of the model in `folder` on each corpus of documents, on a GPU where there is one.

    `context` defaults to the model's own, up to `DEFAULT_CONTEXT`; `stride` to half of it.

    Raises:
        BaseModelError: the folder holds no model that can be loaded.
        ConfigError: `context` or `stride` do not fit the model.
        DataError: it has no tokenizer, or a corpus no document.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(folder)
    longest = int(getattr(model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    context = context or min(longest, DEFAULT_CONTEXT)
    stride = stride or max(1, context // 2)
    if not 2 <= context <= longest or stride >= context:
        raise ConfigError(
            f"{folder}: windows of {context} tokens every {stride} do not fit: the context goes from 2 to the model's "
            f"{longest}, the stride below the context"
        )
    limits = Limits(context, stride, max_documents, max_tokens)
    _logger.info("%s: windows of %d tokens, every %d", folder, context, stride)

    def logits(tokens: Tensor) -> Tensor:
        found: Any = model(tokens.to(device), use_cache=False)
        scores: Tensor = found.logits
        return scores

    vocab_size = int(model.config.vocab_size)
    return {
        name: score(logits, documents, tokenizer, limits, vocab_size=vocab_size, name=name)
        for name, documents in corpora.items()
    }
