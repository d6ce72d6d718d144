"""How the tokenizer in a GGUF file cuts text before its merges apply.

The file has no pattern but a name, `tokenizer.ggml.pre`. transformers knows some names and takes
GPT-2's pattern for all others without a word: digits, spaces and new lines then have other ids than
those that the model was trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import BaseModelError

GPT2_NAMES = ("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling")
"""Names of GPT-2's pattern."""
SINGLE_DIGIT_NAMES = (
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
)
"""Names of GPT-2's pattern after a cut before and after every digit."""


def set_pre_tokenizer(tokenizer: Any, kind: str | None, name: str | None, path: Path) -> None:
    """Gives the byte-level tokenizer that transformers has read from a file its own pattern.

    Args:
        tokenizer: that of transformers (`PreTrainedTokenizerFast`).
        kind: the file's `tokenizer.ggml.model`; only `gpt2`, byte-level BPE, has patterns.
        name: the file's `tokenizer.ggml.pre`.
        path: the file, for messages.

    Raises:
        BaseModelError: neither transformers nor this module knows the pattern of that name.
    """
    if kind != "gpt2":
        return
    if name in SINGLE_DIGIT_NAMES:
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        return
    if name not in (*GPT2_NAMES, *_names_in_transformers()):
        raise BaseModelError(
            f"{path}: tokenizer.ggml.pre: expected a known pattern, found {name!r:.40}, with which "
            "the ids of texts would be wrong; use the model's own folder as the base"
        )


def _names_in_transformers() -> frozenset[str]:
    """The names whose patterns this version of transformers sets itself."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping
    except ImportError:  # an older transformers, which sets none
        return frozenset()
    return frozenset(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)
