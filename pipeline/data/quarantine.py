"""Bad records: each is written down with its file, offset and reason, and counted; too many stop the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import orjson

from pipeline.data.records import Rejected
from pipeline.errors import DataError
from pipeline.files import published_file

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
