"""Rejected records: the quarantine file that lists them, and the fraction of them that a job accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import orjson

from pipeline.data.jobs import UnitRecord
from pipeline.data.records import MAX_RECORD_BYTES, Rejected
from pipeline.data.text_streams import encoding_advice
from pipeline.errors import DataError
from pipeline.files import published_file

# The fraction among fewer records is too uncertain to stop a job. At the end of the job it is always checked.
_RECORDS_BEFORE_CHECK = 10_000
_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 60


class Quarantine(ExitStack):
    """Writes the first rejected records of one unit to `path`; their file is published at the end, if there are any.

    A bad record may be much shorter than its description, so that the number of written ones is limited.
    """

    most_written = 10_000

    def __init__(self, path: Path, source: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._path = path
        self._source = source

    @cached_property
    def _file(self) -> BinaryIO:
        return self.enter_context(published_file(self._path))

    def add(self, record: Rejected) -> None:
        """Writes one record; bytes that are not UTF-8 are shown as \\xNN."""
        self.counts[record.reason] += 1
        if self.counts.total() <= self.most_written:
            excerpt = record.excerpt.decode(errors="backslashreplace")
            line = {"file": self._source, "offset": record.offset, "reason": record.reason, "excerpt": excerpt}
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


class BadRecordLimit:
    """Counts the records of a job, of which at most `fraction` may be bad."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.records = 0
        self.rejected: Counter[str] = Counter()

    def add(self, unit: UnitRecord) -> None:
        """Counts the records of a finished unit."""
        self.records += unit.train.documents + unit.heldout.documents + sum(unit.rejected.values())
        self.rejected.update(unit.rejected)

    def check(self, quarantines: Iterable[Path], *, at_end: bool = False) -> None:
        """Checks the fraction of bad records so far; `quarantines` are the files to take examples from.

        Raises:
            DataError: it is too large; the message shows three examples.
        """
        bad = self.rejected.total()
        if bad <= self.fraction * self.records or (self.records < _RECORDS_BEFORE_CHECK and not at_end):
            return
        lines = (orjson.loads(line) for path in quarantines for line in path.read_bytes().splitlines())
        examples = list(islice(lines, _EXAMPLES))
        shown = "; ".join(
            f"{line['file']} at {line['offset']}: {line['reason']} {line['excerpt'][:_EXAMPLE_CHARACTERS]!r}"
            for line in examples
        )
        raise DataError(
            f"{bad} of {self.records} records are bad, more than --max-bad-fraction {self.fraction} allows: {shown}; "
            f"{self._advice(Path(line['file']) for line in examples)}"
        )

    def _advice(self, files: Iterable[Path]) -> str:
        """What to do about too many rejected records, by their most frequent reason."""
        reason = self.rejected.most_common(1)[0][0]
        if reason in ("no_text_key", "no_prompt_key"):
            key = reason.removeprefix("no_")
            return (
                f"set {key} (--{key.replace('_', '-')}) to one of the keys, for chats messages_key (--messages-key), "
                "and remove the output folder"
            )
        if reason == "too_large":
            return (
                f"a document has at most {MAX_RECORD_BYTES >> 20} MiB: split them (a .txt by `document: blank_line`), "
                "and remove the output folder"
            )
        return next(filter(None, map(encoding_advice, files)), None) or (
            "raise --max-bad-fraction and start again (finished work is kept), or correct the input and remove the "
            "output folder"
        )
