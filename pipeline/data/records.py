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
    "no_prompt_key",
    "prompt_not_usable",
    "too_large",
    "truncated_file",
    "corrupt_file",
]


class Keys(NamedTuple):
    """Under which keys, or in which columns, a record has its text and the prompt before it; None: it has no prompt."""

    text: str = "text"
    prompt: str | None = None

    @property
    def all(self) -> list[str]:
        """Those that a record must have."""
        return [self.text] if self.prompt is None else [self.text, self.prompt]


class Document(NamedTuple):
    """A document as it will be tokenized; with a prompt, `text` is the answer. `_bytes` are those in UTF-8."""

    text: str
    utf8_bytes: int
    prompt: str | None = None
    prompt_utf8_bytes: int = 0

    @property
    def whole_text(self) -> str:
        """The prompt, if there is one, and the text."""
        return (self.prompt or "") + self.text


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


def with_prompt(offset: int, answer: Record, prompt: object) -> Record:
    """The document `answer` behind `prompt`, if that is one too."""
    if isinstance(answer, Rejected):
        return answer
    checked = checked_text(offset, prompt)
    if isinstance(checked, Rejected):
        return checked._replace(reason="prompt_not_usable")
    return Document(answer.text, answer.utf8_bytes, checked.text, checked.utf8_bytes)
