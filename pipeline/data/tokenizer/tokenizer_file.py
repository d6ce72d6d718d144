"""The file of a tokenizer: where it lies, and what in it decides the ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.data.tokenizer.sentencepiece_model import MODEL_FILES, SUFFIX
from pipeline.errors import DataError

_EXPECTED = (
    "expected a tokenizer.json, a model of SentencePiece (.model), or the Hugging Face folder that "
    "has one of them; transformers writes one of other files: "
    "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
)
# Entries of a tokenizer.json that do not decide the ids.
_UNDECISIVE = ("version", "truncation", "padding")
TOKENIZER_FILE = "tokenizer.json"
# The first of them that a folder has is read.
_FILES = (TOKENIZER_FILE, *MODEL_FILES)


def tokenizer_file(path: Path) -> Path:
    """The file of the tokenizer at `path`.

    Raises:
        DataError: where there is none.
    """
    files = [path]
    if path.is_dir():
        files = [path / name for name in _FILES]
    for file in files:
        if file.is_file():
            return file
    raise DataError(f"{files[0]}: no such tokenizer; {_EXPECTED}")


def has_tokenizer_file(folder: Path) -> bool:
    """Whether the folder has a tokenizer that `load_tokenizer` reads, damaged or not."""
    return any((folder / name).is_file() for name in _FILES)


def json_file(path: Path) -> Path:
    """The tokenizer.json of the tokenizer at `path`.

    Raises:
        DataError: where there is none; the message says what to do.
    """
    file = tokenizer_file(path)
    if file.suffix == SUFFIX:
        written = file.with_name(TOKENIZER_FILE)
        raise DataError(
            f"{file}: a model of SentencePiece, expected a tokenizer.json; write it, and see how "
            f"its ids compare on your texts: scale-cpt tokenizer --convert {file} --output "
            f"{written} --report-on FILE…"
        )
    return file


def without_dropout(described: Mapping[str, Any]) -> dict[str, Any] | None:
    """The contents of a tokenizer.json with BPE dropout switched off.

    None where there is none to switch off.

    Dropout, a means against overfitting, leaves out merges at random: the same text gets other
    tokens each time.
    """
    model = described.get("model")
    if not isinstance(model, dict) or not model.get("dropout"):
        return None
    return {**described, "model": {**model, "dropout": None}}


def fingerprint_of(described: dict[str, Any]) -> str:
    """A hash of what decides the ids.

    Truncation, padding, and which of two spellings merges have are left out.
    """
    canonical = dict(described)
    for key in _UNDECISIVE:
        canonical.pop(key, None)
    # Merges are pairs since version 0.20 of `tokenizers`, and were strings before.
    model = dict(canonical.get("model", {}))
    if "merges" in model:
        pairs: list[Any] = []
        for merge in model["merges"]:
            # A space cannot be in a token of a merge that is a string: byte-level BPE spells it Ġ,
            # others ▁.
            pairs.append(merge.split(" ") if isinstance(merge, str) else merge)
        model["merges"] = pairs
    canonical["model"] = model
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return "tokenizers:" + hashlib.sha256(text.encode()).hexdigest()
