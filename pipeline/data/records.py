"""What a reader yields: a document, or a record that cannot be one and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, NamedTuple, Union

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


# --- Bad records: each is written down with its file, offset and reason, and counted; too many stop the job ---------

_SHOWN = 3
# Below so many records a fraction says little; the end of the job checks it whatever their number.
_RECORDS_BEFORE_CHECK = 10_000


class Quarantine(AbstractContextManager["Quarantine"]):
    """The rejected records of one unit. Their file appears, whole, when the block ends; without any there is none."""

    def __init__(self, path: Path, source: str) -> None:
        self.counts: Counter[str] = Counter()
        self._path = path
        self._source = source
        self._files = ExitStack()

    @cached_property
    def _file(self) -> BinaryIO:
        return self._files.enter_context(published_file(self._path))

    def add(self, record: Rejected) -> None:
        """Writes a record down; bytes that are not UTF-8 are shown as \\xNN."""
        self.counts[record.reason] += 1
        excerpt = record.excerpt.decode(errors="backslashreplace")
        line = {"file": self._source, "offset": record.offset, "reason": record.reason, "excerpt": excerpt}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._files.__exit__(kind, error, trace)


class BadRecordLimit:
    """Counts records over the whole job.

    Args:
        fraction: how many of all records may be bad.
        quarantines: the files in which examples of them can be found.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.records = 0
        self.rejected: Counter[str] = Counter()

    def add(self, records: int, rejected: Mapping[str, int]) -> None:
        """Counts the records of a finished unit."""
        self.records += records
        self.rejected.update(rejected)

    def check(self, quarantines: Iterable[Path], *, at_end: bool = False) -> None:
        """Stops the job when too many of the records so far are bad.

        Raises:
            DataError: with three examples.
        """
        bad = self.rejected.total()
        if bad <= self.fraction * self.records or (self.records < _RECORDS_BEFORE_CHECK and not at_end):
            return
        examples = "; ".join(_examples(quarantines))
        raise DataError(
            f"{bad} of {self.records} records are bad, more than --max-bad-fraction {self.fraction} allows: {examples}"
            "; raise --max-bad-fraction and start again (finished work is kept), or mend the input and remove the "
            "output folder"
        )


def _examples(quarantines: Iterable[Path]) -> list[str]:
    shown: list[str] = []
    for path in quarantines:
        with path.open("rb") as file:
            for line in file:
                record = orjson.loads(line)
                shown.append(f"{record['file']} at {record['offset']}: {record['reason']} {record['excerpt'][:40]!r}")
                if len(shown) == _SHOWN:
                    return shown
    return shown
