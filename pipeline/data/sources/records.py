"""The records that readers yield: documents, and rejected ones."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, Protocol, Union

Reason = Literal[
    "malformed_json", "malformed_csv", "not_an_object", "no_text_key", "text_not_string",
    "invalid_utf8", "empty_text", "nul_character", "lone_surrogate", "no_prompt_key",
    "prompt_not_usable", "messages_not_usable", "no_answer", "too_large", "truncated_file",
    "corrupt_file",
]  # fmt: skip

DocumentUnit = Literal["line", "file"]
Quoting = Literal["standard", "none"]
Normalization = Literal["nfc"]
SpecialTokens = Literal["text", "control"]
HeldoutBy = Literal["text", "words"]

EXCERPT_BYTES = 200
# Every worker must have room for one record of this size.
MAX_RECORD_BYTES = 32 * 2**20


class ChatFormat(Protocol):
    """What turns a chat into documents; `pipeline.data.tokenizer.chats` has the one of chat
    templates."""

    @property
    def date(self) -> str | None:
        """The day that it is told is today, as YYYY-MM-DD, if it asks."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides how a chat is rendered."""

    def say_start(self) -> None:
        """Says in the log where chats begin otherwise than the tokenizer's other texts."""

    def records(
        self, offset: int, found: object, beside: Mapping[str, object] = {}
    ) -> Iterator[Record]:
        """The documents of the list of messages `found`, or why there is none.

        `beside`: what the record has under `Keys.beside_chat`, by the last part of its key.
        """


class Keys(NamedTuple):
    """Where documents are in the inputs: the keys, or columns, of a record's text and of the prompt
    before it, if any.

    With `chat` both are the key of a chat's messages. `document` is what a document is in a text
    file, `encoding` that of a file that is not UTF-8, as Python names it. `quoting` is of CSV and
    TSV; None: that of the format. `normalize`: the form of Unicode that texts are brought to.
    `special_tokens`: what a text that spells one becomes; None: text where the tokenizer can.
    `allow_damaged`: of a damaged file what precedes the damage is read.
    """

    text: str = "text"
    prompt: str | None = None
    document: DocumentUnit = "line"
    chat: ChatFormat | None = None
    encoding: str | None = None
    quoting: Quoting | None = None
    normalize: Normalization | None = None
    special_tokens: SpecialTokens | None = None
    allow_damaged: bool = False

    @property
    def all(self) -> list[str]:
        """The keys that a record must have."""
        if self.prompt is None:
            return [self.text]
        return [self.text, self.prompt]

    @property
    def beside_chat(self) -> list[str]:
        """The keys that a record may have beside those of its chat.

        They are `tools`, which the template may describe, and of TRL's records of `prompt` and
        `completion` the latter.
        """
        if self.chat is None:
            return []
        parent, dot, name = self.text.rpartition(".")
        names = ["tools"]
        if name == "prompt":
            names.append("completion")
        return [f"{parent}{dot}{beside}" for beside in names]


class Document(NamedTuple):
    """A usable record. If it has a prompt, `text` is the answer.

    `group`: documents of one are held out together, as the answers of a chat are; by default each
    is alone. `ids`: of the text, where another program has tokenized it. `has_control`: special
    tokens in the text are these tokens, as the template of a chat writes them. `utf8`: the text as
    UTF-8, where its reader has made that already. `start`: what a chat begins with before its
    prompt, such as `<s>`, or nothing; None: what the tokenizer puts before every document.
    """

    text: str
    prompt: str | None = None
    group: str = ""
    ids: list[int] | None = None
    has_control: bool = False
    utf8: bytes | None = None
    start: str | None = None

    @property
    def whole_text(self) -> str:
        """The prompt, if there is one, and the text."""
        return (self.prompt or "") + self.text

    @property
    def utf8_bytes(self) -> int:
        """The bytes of its whole text."""
        if self.utf8 is not None and self.prompt is None:
            return len(self.utf8)
        return len(self.whole_text.encode(errors="replace"))

    @property
    def is_ascii(self) -> bool:
        """Whether its whole text is ASCII, which is in every form of Unicode."""
        # Python keeps this with each string, so it takes no time.
        return self.text.isascii() and (self.prompt is None or self.prompt.isascii())

    @property
    def held_out_by(self) -> str:
        """The text whose hash decides whether it is held out."""
        return self.group or self.whole_text


class Rejected(NamedTuple):
    """A record that is left out. `offset` is its first byte in the (decompressed) file, or its row.

    `detail`: what a library, or the check of a message, says about it; often empty. `size`: the
    bytes of text that are lost with it; None where its reader does not know.
    """

    offset: int
    reason: Reason
    excerpt: bytes
    detail: str = ""
    size: int | None = None

    @property
    def lost_bytes(self) -> int:
        """The bytes of text that are lost, at least those that are shown."""
        return len(self.excerpt) if self.size is None else self.size

    def __str__(self) -> str:
        shown = f"{self.reason} {self.excerpt.decode(errors='backslashreplace')!r}"
        if self.detail:
            shown = f"{shown} ({self.detail})"
        return shown


Record = Union[Document, Rejected]


def record_of(offset: int, text: object, *prompt: object) -> Record:
    """The document of `text`, a string or UTF-8, with a `prompt` before it if one is given; or why
    it cannot be one."""
    utf8: bytes | None = None
    if isinstance(text, bytes):
        utf8 = text
        try:
            text = utf8.decode()
        except UnicodeDecodeError:
            return Rejected(offset, "invalid_utf8", utf8[:EXCERPT_BYTES], size=len(utf8))
    if not isinstance(text, str):
        # A container's own text may be long, or too deep for Python to write.
        shown = type(text).__name__ if isinstance(text, (list, dict)) else repr(text)
        advice = ""
        if isinstance(text, list) and text and isinstance(text[0], dict):
            advice = "a list of objects; messages of a chat are named as messages_key"
        return Rejected(offset, "text_not_string", _excerpt(shown), advice)
    if not text or text.isspace():
        # White space is no loss.
        return Rejected(offset, "empty_text", _excerpt(text), size=0)
    if "\0" in text:
        return Rejected(offset, "nul_character", _excerpt(text), size=len(text))
    if utf8 is None:
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as error:
            # Half a pair of JSON's escapes, such as \\ud83d alone, is no character.
            return Rejected(offset, "lone_surrogate", _excerpt(text), str(error), len(text))
    if len(utf8) > MAX_RECORD_BYTES:
        return Rejected(offset, "too_large", _excerpt(text), size=len(utf8))
    if not prompt:
        return Document(text, utf8=utf8)
    before = record_of(offset, *prompt)
    if isinstance(before, Rejected):
        detail = f"{before.reason} {before.detail}".strip()
        return before._replace(reason="prompt_not_usable", detail=detail, size=len(utf8))
    return Document(text, before.text, utf8=utf8)


def _excerpt(text: str) -> bytes:
    return text[:EXCERPT_BYTES].encode(errors="backslashreplace")


def composed(record: Record) -> Record:
    """The record with its text, and its prompt, in Unicode's NFC; a rejected one as it is."""
    if isinstance(record, Rejected) or record.is_ascii:
        return record
    prompt = None if record.prompt is None else unicodedata.normalize("NFC", record.prompt)
    text = unicodedata.normalize("NFC", record.text)
    return record._replace(text=text, prompt=prompt, utf8=None)


def value_at(record: Mapping[str, object], key: str) -> object:
    """The value of `record` under a key, or under a path of keys such as `meta.body`.

    Raises:
        KeyError: there is none.
    """
    if key in record:
        return record[key]
    found: object = record
    for name in key.split("."):
        if not isinstance(found, Mapping):
            raise KeyError(key)
        found = found[name]
    return found


def beside_chat(record: Mapping[str, object], keys: Keys) -> dict[str, object]:
    """What a record has beside the messages of its chat, by the last part of its key."""
    found: dict[str, object] = {}
    for key in keys.beside_chat:
        try:
            value = value_at(record, key)
        except KeyError:
            continue
        if value is not None:
            found[key.rpartition(".")[2]] = value
    return found


def missing_column(names: Iterable[str], keys: Keys) -> str | None:
    """What to say of a table of the columns `names` that lacks a column of `keys`; None if none."""
    for key, option in zip(keys.all, ("--text-key", "--prompt-key"), strict=False):
        if key not in names:
            return f"has no column {key!r}; set {option} to one of: {', '.join(names)[:500]}"
    return None


def repeated_column(path: object, key: str) -> str:
    """What is wrong with the table in a file that has several columns `key`."""
    return f"{path}: has several columns {key!r}; rename all but one"
