"""The records that readers yield: documents, and rejected ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Union

if TYPE_CHECKING:  # it makes documents
    from pipeline.data.chats import ChatTemplate

Reason = Literal[
    "malformed_json", "malformed_csv", "not_an_object", "no_text_key", "text_not_string", "invalid_utf8", "empty_text",
    "nul_character", "no_prompt_key", "prompt_not_usable", "messages_not_usable", "no_answer", "too_large",
    "truncated_file", "corrupt_file",
]  # fmt: skip

DocumentUnit = Literal["line", "file", "blank_line"]

EXCERPT_BYTES = 200
# Every worker must have room for one record of this size.
MAX_RECORD_BYTES = 32 * 2**20


class Keys(NamedTuple):
    """Where documents are in the inputs.

    The keys, or columns, of a record's text and of the prompt before it; None: records have no prompt. With `chat` both
    are the key of a chat's messages. `document` is what a document is in a text file, `encoding` that of a file that is
    not UTF-8, as Python names it.
    """

    text: str = "text"
    prompt: str | None = None
    document: DocumentUnit = "line"
    chat: ChatTemplate | None = None
    encoding: str | None = None

    @property
    def all(self) -> list[str]:
        """The keys that a record must have."""
        return [self.text] if self.prompt is None else [self.text, self.prompt]


class Document(NamedTuple):
    """A usable record. If it has a prompt, `text` is the answer.

    `group`: documents of one are held out together, as the answers of a chat are; by default each is alone. `ids`:
    of the text, where another program has tokenized it. `offset`: of its page in a web archive.
    """

    text: str
    prompt: str | None = None
    group: str = ""
    ids: list[int] | None = None
    offset: int = 0

    @property
    def whole_text(self) -> str:
        """The prompt, if there is one, and the text."""
        return (self.prompt or "") + self.text

    @property
    def utf8_bytes(self) -> int:
        """The length of the whole text in UTF-8."""
        return len(self.whole_text.encode(errors="replace"))

    @property
    def held_out_by(self) -> str:
        """The text whose hash decides whether it is held out."""
        return self.group or self.whole_text


class Rejected(NamedTuple):
    """A record that is left out. `offset` is its first byte in the (decompressed) file, or its row."""

    offset: int
    reason: Reason
    excerpt: bytes


Record = Union[Document, Rejected]


def text_of_bytes(offset: int, content: bytes) -> Record:
    """The document whose text is `content` in UTF-8, or why it cannot be one."""
    try:
        return checked_text(offset, content.decode())
    except UnicodeDecodeError:
        return Rejected(offset, "invalid_utf8", content[:EXCERPT_BYTES])


def checked_text(offset: int, text: object) -> Record:
    """`text` as a document, or why it cannot be one."""
    if not isinstance(text, str):
        # A container's own text may be long, or too deep for Python to write.
        shown = type(text).__name__ if isinstance(text, (list, dict)) else repr(text)
        return Rejected(offset, "text_not_string", shown[:EXCERPT_BYTES].encode(errors="backslashreplace"))
    if not text or text.isspace():
        return Rejected(offset, "empty_text", text[:EXCERPT_BYTES].encode())
    if "\0" in text:
        return Rejected(offset, "nul_character", text[:EXCERPT_BYTES].encode())
    if len(text.encode()) > MAX_RECORD_BYTES:
        return Rejected(offset, "too_large", text[:EXCERPT_BYTES].encode())
    return Document(text)


def with_prompt(offset: int, answer: Record, prompt: object) -> Record:
    """The document `answer` with `prompt` before it, or why that is not possible."""
    if isinstance(answer, Rejected):
        return answer
    checked = checked_text(offset, prompt)
    if isinstance(checked, Rejected):
        return checked._replace(reason="prompt_not_usable")
    return answer._replace(prompt=checked.text)


def missing_column(names: Iterable[str], keys: Keys) -> str | None:
    """What is wrong with a table of the columns `names`: the first column of `keys` that it lacks."""
    for key, option in zip(keys.all, ("--text-key", "--prompt-key"), strict=False):
        if key not in names:
            return f"has no column {key!r}; set {option} to one of: {', '.join(names)[:500]}"
    return None


def row_record(row: int, values: Sequence[bytes | None]) -> Record:
    """The record in a row of a table: the values in the columns of `Keys.all`, in UTF-8; None is null."""
    text, *prompt = (
        Rejected(row, "text_not_string", b"null") if value is None else text_of_bytes(row, value) for value in values
    )
    if not prompt:
        return text
    return with_prompt(row, text, prompt[0].text if isinstance(prompt[0], Document) else None)
