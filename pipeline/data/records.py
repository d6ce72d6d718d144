"""The records that readers yield: documents and rejected ones."""

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
    "no_prompt_key",
    "prompt_not_usable",
    "too_large",
    "truncated_file",
    "corrupt_file",
]

EXCERPT_BYTES = 200
# Every worker must have room for one record of this size.
MAX_RECORD_BYTES = 32 * 2**20


class Keys(NamedTuple):
    """The keys, or columns, of a record's text and of the prompt before it; None: records have no prompt."""

    text: str = "text"
    prompt: str | None = None

    @property
    def all(self) -> list[str]:
        """The keys that a record must have."""
        return [self.text] if self.prompt is None else [self.text, self.prompt]


class Document(NamedTuple):
    """A usable record. If it has a prompt, `text` is the answer. `..._bytes` are lengths in UTF-8."""

    text: str
    utf8_bytes: int
    prompt: str | None = None
    prompt_utf8_bytes: int = 0

    @property
    def whole_text(self) -> str:
        """The prompt, if there is one, and the text."""
        return (self.prompt or "") + self.text


class Rejected(NamedTuple):
    """A record that is left out. `offset` is its first byte in the (decompressed) file, or its row."""

    offset: int
    reason: Reason
    excerpt: bytes


Record = Union[Document, Rejected]


def checked_text(offset: int, text: object) -> Record:
    """`text` as a document, or why it cannot be one."""
    if not isinstance(text, str):
        return Rejected(offset, "text_not_string", repr(text)[:EXCERPT_BYTES].encode(errors="backslashreplace"))
    if not text or text.isspace():
        return Rejected(offset, "empty_text", text[:EXCERPT_BYTES].encode())
    if "\0" in text:
        return Rejected(offset, "nul_character", text[:EXCERPT_BYTES].encode())
    return Document(text, len(text.encode()))


def with_prompt(offset: int, answer: Record, prompt: object) -> Record:
    """The document `answer` with `prompt` before it, or why that is not possible."""
    if isinstance(answer, Rejected):
        return answer
    checked = checked_text(offset, prompt)
    if isinstance(checked, Rejected):
        return checked._replace(reason="prompt_not_usable")
    return Document(answer.text, answer.utf8_bytes, checked.text, checked.utf8_bytes)
