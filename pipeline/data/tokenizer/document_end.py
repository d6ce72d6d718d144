"""Which token ends a document: the user's, the tokenizer's own, the folder's or a known one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.files.json_files import read_object

# For a tokenizer.json alone, which does not say which of its special tokens ends a text.
_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")


def document_end(
    file: Path,
    id_of: Callable[[str], int | None],
    vocab_size: int,
    wanted: str | None,
    own_end: tuple[int, ...],
) -> tuple[int, ...]:
    """The ids that end a document.

    They are what the user wants, the tokenizer's own, the folder's, or a well-known token.

    Raises:
        DataError: there is none, or the tokenizer does not have the one that is named.
    """
    if wanted is not None:
        found = id_of(wanted)
        if found is None:
            raise DataError(
                f"{file}: has no token {wanted!r} to end documents with; name one of its own"
            )
        return (found,)
    if own_end:
        return own_end
    named = spelling_of(json_beside(file, "tokenizer_config.json").get("eos_token"))
    if named is not None:
        found = id_of(named)
        if found is None:
            raise DataError(
                f"{file.with_name('tokenizer_config.json')}: eos_token: expected a token of the "
                f"tokenizer, found {named!r}, which it does not have; correct it, or name one with "
                "--end-of-document"
            )
        return (found,)
    # In this order, because transformers' `generate` stops at the former's.
    for name in ("generation_config.json", "config.json"):
        found = _end_in(file.with_name(name), vocab_size)
        if found is not None:
            return (found,)
    # A tokenizer.json alone, whose vocabulary is all that it says.
    for candidate in _KNOWN_ENDS:
        found = id_of(candidate)
        if found is not None:
            return (found,)
    raise DataError(
        f"{file}: does not say which token ends a document; name it with --end-of-document"
    )


def _end_in(file: Path, vocab_size: int) -> int | None:
    """The `eos_token_id` in a file beside the tokenizer, of several the first.

    None if it has none.

    Raises:
        DataError: it is beyond the vocabulary.
    """
    found = json_beside(file, file.name).get("eos_token_id")
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, int) or found < 0:
        return None
    if found >= vocab_size:
        raise DataError(
            f"{file}: eos_token_id: expected an id of the tokenizer, below {vocab_size}, found "
            f"{found}; correct it, or name the token with --end-of-document"
        )
    return found


def spelling_of(token: object) -> str | None:
    """The spelling of a special token in a tokenizer_config.json, which has text or an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def json_beside(file: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of the tokenizer's folder; empty if there is none."""
    try:
        return read_object(file.with_name(name), DataError)
    except FileNotFoundError:
        return {}
