"""The rejected records of a corpus: the first of each unit are kept to look at, and too many of them stop the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path

import orjson

from pipeline.data.file_content import FileContent, HashedFile, hashed_file
from pipeline.data.records import Rejected
from pipeline.errors import DataError
from pipeline.untrusted_files import open_regular

KEPT_RECORDS = 1000
"""Of one unit. The others are only counted."""

# The fraction among fewer records is too uncertain to stop a job. At the end of the job it is always checked.
_RECORDS_BEFORE_CHECK = 10_000


class Quarantine(ExitStack):
    """Writes the first rejected records of one unit to `path`; their file is published at the end, if there are any.

    Attributes:
        counts: how many were rejected, by reason.
    """

    def __init__(self, path: Path, source: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._path = path
        self._source = source
        self._kept = 0

    @cached_property
    def _file(self) -> HashedFile:
        return self.enter_context(hashed_file(self._path))

    def add(self, record: Rejected) -> None:
        """Counts a record, and writes it if few were written; bytes that are not UTF-8 are shown as \\xNN."""
        self.counts[record.reason] += 1
        if self._kept == KEPT_RECORDS:
            return
        self._kept += 1
        excerpt = record.excerpt.decode(errors="backslashreplace")
        line = {"file": self._source, "offset": record.offset, "reason": record.reason, "excerpt": excerpt}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def finish(self) -> FileContent | None:
        """Writes how many records were left out, if any; what the file holds, if there is one."""
        if self._kept == 0:
            return None
        if left_out := self.counts.total() - self._kept:
            line = {"file": self._source, "left_out": left_out}
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        return self._file.content


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
            f"{'; '.join(_examples(quarantines, 3))}; raise --max-bad-fraction and start again (finished work is "
            "kept), or correct the input and remove the output folder"
        )


def _examples(quarantines: Iterable[Path], count: int) -> list[str]:
    found: list[str] = []
    for path in quarantines:
        with open_regular(path, DataError, "start again") as file:
            for record in map(orjson.loads, islice(file, count - len(found))):
                found.append(f"{record['file']} at {record['offset']}: {record['reason']} {record['excerpt'][:40]!r}")
        if len(found) >= count:
            break
    return found
