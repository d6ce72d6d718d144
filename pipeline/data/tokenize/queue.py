"""The queue of every job that fills a corpus folder: units of work, for any number of workers and
jobs, restartable.

A record is written after all other files of its unit, so a unit without one is done again, to the
same bytes. A job that continues compares the files with their records, and does a unit again of
which a file is missing or differs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from pipeline import log
from pipeline.data.corpus.indexed_dataset import check_file
from pipeline.data.tokenize.unit_records import PLAN_FILE, UNIT_IS_DONE_AGAIN, UnitOutcome, WorkUnit
from pipeline.data.tokenize.workers import Workers
from pipeline.errors import DataError
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_record, write_record
from pipeline.log import progress_bar

# Of what is done again, so many are named in the log.
_MOST_NAMED = 5
_logger = log.get_logger(__name__)

JobShare = tuple[int, int]
"""(k, n): the k-th of n jobs that make a corpus together, from 0.

A job begins with its own units, but can do all of them.
"""
_Unit = TypeVar("_Unit", bound=WorkUnit)
_Record = TypeVar("_Record", bound=UnitOutcome)


def run_units(
    state: Path,
    schema: type[_Record],
    work: Callable[[_Unit], _Record],
    units: Sequence[_Unit],
    workers: Workers,
    share: JobShare = (0, 1),
    *,
    what: str,
    measured_in: str = "B",
) -> Iterator[tuple[str, _Record]]:
    """The name and the record of every unit: first the finished ones, then each as it is finished.

    Args:
        state: the folder of the records, which are of type `schema`.
        schema: the type of the records.
        work: does a unit, and returns its record.
        units: all units of the corpus.
        workers: do the units.
        share: this job's. Its own units come first, then the others' from the end, which those jobs
            reach last.
        what: what is done, for the progress bar.
        measured_in: the unit of the sizes, for the progress bar.
    """
    records = _Records(state, schema, file_hash(state / PLAN_FILE), _time_of(state))
    done: set[str] = set()
    for name, record in _sound_records(records, units, workers, share):
        done.add(name)
        yield name, record

    sizes: dict[str, int] = {}
    left: list[_Unit] = []
    for unit in units:
        sizes[unit.name] = unit.size
        if unit.name not in done:
            left.append(unit)
    size_done = sum(sizes[name] for name in done)
    do = partial(_do, records, work)
    with progress_bar(what, sum(sizes.values()), measured_in, done=size_done) as progress:
        for name, record in workers.run(do, _in_turn(left, share)):
            progress.update(sizes[name])
            yield name, record


def _sound_records(
    records: _Records[_Record], units: Sequence[_Unit], workers: Workers, share: JobShare
) -> Iterator[tuple[str, _Record]]:
    """The finished units whose files are as they were written. The log names why others are not."""
    # One listing: to look for the record of each unit takes long on a network file system.
    with os.scandir(records.state) as entries:
        recorded = {entry.name for entry in entries}
    found = [unit for unit in units if f"{unit.name}.json" in recorded]
    faults: list[str] = []
    if found:
        # All workers compare, because hashing the files takes as long as reading them.
        with progress_bar("checking finished units", len(found), " units") as checked:
            for kept in workers.run(records.kept, _in_turn(found, share)):
                checked.update(1)
                if kept.record is not None:
                    yield kept.name, kept.record
                elif kept.fault:
                    faults.append(kept.fault)
    warn_of_repeats(faults)


def _in_turn(units: Sequence[_Unit], share: JobShare) -> list[_Unit]:
    """This job's own units, then the others' from the end, which those jobs reach last."""
    k, n = share
    others = [unit for number, unit in enumerate(units) if number % n != k]
    others.reverse()
    return [*units[k::n], *others]


def warn_of_repeats(faults: Sequence[str]) -> None:
    """Says why work is done again; of many alike, the first."""
    for fault in faults[:_MOST_NAMED]:
        _logger.warning("%s", fault)
    if len(faults) > _MOST_NAMED:
        _logger.warning("%d others are done again, for like reasons", len(faults) - _MOST_NAMED)


def _time_of(state: Path) -> int:
    """Now, in nanoseconds, by the clock that gives the files in `state` their times: machines may
    differ."""
    with tempfile.NamedTemporaryFile(dir=state, prefix=".now.") as file:
        return os.fstat(file.fileno()).st_mtime_ns


@dataclass(frozen=True)
class _Kept(Generic[_Record]):
    """A unit that was found: its record, or None and the reason for which it is done again, if
    there is any."""

    name: str
    record: _Record | None
    fault: str = ""


@dataclass(frozen=True)
class _Records(Generic[_Record]):
    """The records of finished units in `state`, of the type `schema`, made for the plan of that
    hash."""

    state: Path
    schema: type[_Record]
    plan: str
    began: int
    """when this job began to look at them, in nanoseconds

    Another job has compared, or just written, each record with a later time.
    """

    def kept(self, unit: WorkUnit) -> _Kept[_Record]:
        """The record of `unit`, if it is sound and its files are as they were written.

        Sizes are always compared, and hashes where no other job has compared them since this one
        began.
        """  # noqa: DOC501
        path = self.path_of(unit.name)
        try:
            changed = path.stat().st_mtime_ns
            record = read_record(
                path, self.schema, DataError, UNIT_IS_DONE_AGAIN, needs_checksum=True
            )
            if (record.unit, record.plan) != (unit.name, self.plan):
                raise DataError(
                    f"{path}: is of another unit, or of another {PLAN_FILE}; {UNIT_IS_DONE_AGAIN}"
                )
            for file, content in record.written(self.state, unit.name):
                # A record that is younger than this job was written, or compared, by another one
                # meanwhile: hashing its files again would double the reading.
                check_file(file, content, UNIT_IS_DONE_AGAIN, whole=changed <= self.began)
        except FileNotFoundError:
            return _Kept(unit.name, None)
        except DataError as fault:
            return _Kept(unit.name, None, str(fault))
        if changed <= self.began:
            # The new time tells jobs beside this one that the hashes were compared. It cannot be
            # set for another user's file, or for one that is gone since: others compare it, too.
            with contextlib.suppress(OSError):
                os.utime(path)
        return _Kept(unit.name, record)

    def write(self, name: str, record: _Record) -> _Record:
        made = record.model_copy(update={"unit": name, "plan": self.plan})
        write_record(self.path_of(name), made)
        return made

    def path_of(self, name: str) -> Path:
        return self.state / f"{name}.json"


def _do(
    records: _Records[_Record], work: Callable[[_Unit], _Record], unit: _Unit
) -> tuple[str, _Record]:
    # Another job may have done it since the first look.
    record = records.kept(unit).record
    if record is None:
        record = records.write(unit.name, work(unit))
    return unit.name, record
