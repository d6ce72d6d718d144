"""The records that readers yield, documents and rejected ones, and the quarantine of the rejected ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, Union

import orjson

from pipeline.errors import DataError
from pipeline.files import published_file

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
    "messages_not_usable",
    "no_answer",
    "too_large",
    "truncated_file",
    "corrupt_file",
]

DocumentUnit = Literal["line", "file", "blank_line"]

EXCERPT_BYTES = 200
# Every worker must have room for one record of this size.
MAX_RECORD_BYTES = 32 * 2**20

# The fraction among fewer records is too uncertain to stop a job. At the end of the job it is always checked.
_RECORDS_BEFORE_CHECK = 10_000
# So that the message about a small file counts all of its bad records.
_REJECTED_BEFORE_STOP = 1000
_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 60


class Chat(Protocol):
    """Makes documents of a chat; see `data.chats`."""

    @property
    def fingerprint(self) -> str:
        """What decides how a chat is rendered."""
        ...

    def records(self, offset: int, messages: object) -> Iterator[Record]:
        """The documents of one."""
        ...


class Keys(NamedTuple):
    """Where documents are in the inputs.

    The keys, or columns, of a record's text and of the prompt before it; None: records have no prompt. With `chat` both
    are the key of a chat's messages. `document` is what a document is in a text file.
    """

    text: str = "text"
    prompt: str | None = None
    document: DocumentUnit = "line"
    chat: Chat | None = None

    @property
    def all(self) -> list[str]:
        """The keys that a record must have."""
        return [self.text] if self.prompt is None else [self.text, self.prompt]


class Document(NamedTuple):
    """A usable record. If it has a prompt, `text` is the answer. `..._bytes` are lengths in UTF-8.

    `group`: documents of one are held out together, as the answers of a chat are; by default each is alone.
    """

    text: str
    utf8_bytes: int
    prompt: str | None = None
    prompt_utf8_bytes: int = 0
    group: str = ""

    @property
    def whole_text(self) -> str:
        """The prompt, if there is one, and the text."""
        return (self.prompt or "") + self.text

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


def checked_text(offset: int, text: object) -> Record:
    """`text` as a document, or why it cannot be one."""
    if not isinstance(text, str):
        return Rejected(offset, "text_not_string", _shown(text)[:EXCERPT_BYTES].encode(errors="backslashreplace"))
    if not text or text.isspace():
        return Rejected(offset, "empty_text", text[:EXCERPT_BYTES].encode())
    if "\0" in text:
        return Rejected(offset, "nul_character", text[:EXCERPT_BYTES].encode())
    return Document(text, len(text.encode()))


def _shown(value: object) -> str:
    """A value of JSON that is not a string. A container's own text may be long, or too deep for Python to write."""
    return type(value).__name__ if isinstance(value, (list, dict)) else repr(value)


def with_prompt(offset: int, answer: Record, prompt: object) -> Record:
    """The document `answer` with `prompt` before it, or why that is not possible."""
    if isinstance(answer, Rejected):
        return answer
    checked = checked_text(offset, prompt)
    if isinstance(checked, Rejected):
        return checked._replace(reason="prompt_not_usable")
    return Document(answer.text, answer.utf8_bytes, checked.text, checked.utf8_bytes)


class Quarantine(ExitStack):
    """Writes the first rejected records of one unit to `path`; their file is published at the end, if there are any.

    A bad record may be much shorter than its description, so that the number of written ones is limited.
    """

    most_written = 10_000

    def __init__(self, path: Path, source: str, most_rejected: float = math.inf) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._total = 0
        self._examples: list[str] = []
        self._path = path
        self._source = source
        self._most = max(most_rejected, _REJECTED_BEFORE_STOP)

    @cached_property
    def _file(self) -> BinaryIO:
        return self.enter_context(published_file(self._path))

    def add(self, record: Rejected) -> None:
        """Writes one record; bytes that are not UTF-8 are shown as \\xNN.

        Raises:
            DataError: there are more than `most_rejected`.
        """
        self.counts[record.reason] += 1
        self._total += 1
        if self._total > self.most_written and self._total <= self._most:
            return
        excerpt = record.excerpt.decode(errors="backslashreplace")
        line = {"file": self._source, "offset": record.offset, "reason": record.reason, "excerpt": excerpt}
        if len(self._examples) < _EXAMPLES:
            self._examples.append(_description(line))
        if self._total > self._most:
            raise DataError(
                f"{self._source}: {self._total} records are bad, more than --max-bad-fraction allows in all of the "
                f"input: {'; '.join(self._examples)}; {_advice(self.counts)}"
            )
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


class BadRecordLimit:
    """Counts the records of a job, of which at most `fraction` may be bad."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.records = 0
        self.rejected: Counter[str] = Counter()

    def add(self, records: int, rejected: Mapping[str, int]) -> None:
        """Counts the records of a finished unit, and the rejected ones among them by reason."""
        self.records += records
        self.rejected.update(rejected)

    def check(self, quarantines: Iterable[Path], *, at_end: bool = False) -> None:
        """Checks the fraction of bad records so far; `quarantines` are the files to take examples from.

        Raises:
            DataError: it is too large; the message shows three examples.
        """
        bad = self.rejected.total()
        if bad <= self.fraction * self.records or (self.records < _RECORDS_BEFORE_CHECK and not at_end):
            return
        raise DataError(
            f"{bad} of {self.records} records are bad, more than --max-bad-fraction {self.fraction} allows: "
            f"{'; '.join(islice(_descriptions(quarantines), _EXAMPLES))}; {_advice(self.rejected)}"
        )


def _descriptions(quarantines: Iterable[Path]) -> Iterator[str]:
    for path in quarantines:
        with path.open("rb") as file:
            yield from map(_description, map(orjson.loads, file))


def _description(line: Mapping[str, Any]) -> str:
    return f"{line['file']} at {line['offset']}: {line['reason']} {line['excerpt'][:_EXAMPLE_CHARACTERS]!r}"


def _advice(rejected: Counter[str]) -> str:
    """What to do about too many rejected records, by their most frequent reason."""
    reason = rejected.most_common(1)[0][0]
    if reason in ("no_text_key", "no_prompt_key"):
        key = reason.removeprefix("no_")
        return f"set {key} (--{key.replace('_', '-')}) to one of the keys, and remove the output folder"
    if reason == "too_large":
        return (
            f"a document has at most {MAX_RECORD_BYTES >> 20} MiB: split them (a .txt by `document: blank_line`), and "
            "remove the output folder"
        )
    return (
        "raise --max-bad-fraction and start again (finished work is kept), or correct the input and remove the output "
        "folder"
    )
