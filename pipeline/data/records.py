"""What a reader yields: a document, or a record that cannot be one and why."""

from __future__ import annotations

from typing import Literal, NamedTuple, Union

Reason = Literal[
    "malformed_json",
    "not_an_object",
    "no_text_key",
    "text_not_string",
    "invalid_utf8",
    "empty_text",
    "nul_character",
    "too_large",
    "truncated_file",
    "corrupt_file",
]


class Document(NamedTuple):
    """A document as it will be tokenized. `utf8` is `text` in UTF-8."""

    text: str
    utf8_bytes: int


class Rejected(NamedTuple):
    """A record that is left out; `offset` is the byte at which it begins in the (decompressed) file, or its row."""

    offset: int
    reason: Reason
    excerpt: bytes


Record = Union[Document, Rejected]

EXCERPT_BYTES = 200
# One record in memory at a time must fit every worker; a document of this size is no document.
MAX_RECORD_BYTES = 32 * 2**20


def checked_text(offset: int, text: object) -> Record:
    """`text` as a document, if it is one."""
    if not isinstance(text, str):
        return Rejected(offset, "text_not_string", repr(text)[:EXCERPT_BYTES].encode(errors="backslashreplace"))
    if not text or text.isspace():
        return Rejected(offset, "empty_text", text[:EXCERPT_BYTES].encode())
    if "\0" in text:
        return Rejected(offset, "nul_character", text[:EXCERPT_BYTES].encode())
    return Document(text, len(text.encode()))
