"""The state of a corpus in the making: what its folder was begun for, and which units of work are done.

It lies in the corpus's own folder, and is removed when the corpus is complete. Each record in it holds a checksum and
the hash of what it was made for. A damaged or foreign one counts as missing, and what it says is found out again; only
the plan is refused.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from pipeline import log
from pipeline.data.file_content import FileContent, check_file
from pipeline.data.token_corpus import CORPUS, ShardRecord
from pipeline.data.token_shards import ShardFile
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import check_replaceable, file_hash, json_hash, read_record, rename_aside, write_record
from pipeline.log import progress_bar

_T = TypeVar("_T")
_Plan = TypeVar("_Plan", bound=BaseModel)
_PLAN = "plan.json"
_logger = log.get_logger(__name__)


def begin(output: Path, state: Path, plan: BaseModel, heldout: Path | None = None) -> None:
    """Begins the corpus in `output` and `heldout` for `plan`, or continues one that was begun for the same.

    Raises:
        OutputError: one of the folders holds something else.
        DataError: `state` cannot be made, is a link, or was begun for another plan.
    """
    for folder in filter(None, (output, heldout)):
        check_replaceable(folder, CORPUS, begun=state)
    if state.is_symlink():  # a stranger's folder must not make a job write elsewhere
        raise DataError(f"{state}: is a link, expected a folder; remove it and start again")
    for folder in filter(None, (state, heldout)):
        make_folder(folder)
    found = begun_for(state, type(plan))
    if found is None:
        write_record(state / _PLAN, plan)
        found = begun_for(state, type(plan))
    if found is not None:
        refuse_other(output, plan, found)


def begun_for(state: Path, kind: type[_Plan]) -> _Plan | None:
    """The plan for which a job began in the folder `state`; None where none has.

    Raises:
        DataError: it is damaged, or of another kind: another tool is making a corpus there.
    """
    advice = (
        f"if another tool is making another corpus there, choose another --output; else remove the folder "
        f"{state.parent} to start again"
    )
    try:
        return read_record(state / _PLAN, kind, DataError, advice)
    except FileNotFoundError:
        return None


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, unless it exists.

    Raises:
        DataError: that is not possible.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot make this folder ({error.strerror}); choose another --output"
        ) from None


def refuse_other(output: Path, expected: _Plan, found: _Plan) -> None:
    """Raises DataError where `output` was begun for another plan than `expected`; names the first difference."""
    for name in type(expected).model_fields:
        values = [repr(getattr(plan, name)) for plan in (expected, found)]
        if values[0] != values[1]:
            shown = [value if len(value) <= 120 else value[:117] + "..." for value in values]
            raise DataError(
                f"{output}: was begun with another {name.replace('_', ' ')}: expected {shown[0]}, found "
                f"{shown[1]}; set it back, or remove this folder and {output.name}.heldout to make the corpus again, "
                "or choose another --output"
            )


def remove_state(state: Path) -> None:
    """Removes the state of a finished corpus. It is renamed first, because another job may be reading it."""
    with contextlib.suppress(OSError):  # another job is renaming and removing it
        shutil.rmtree(rename_aside(state), ignore_errors=True)


# --- Records of what was found out or made ---------------------------------------------------------------------------


class StateRecord(BaseModel):
    """A record of the state. `made_for` is `identity` of the plan and of the task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    made_for: str


_StateRecord = TypeVar("_StateRecord", bound=StateRecord)


def identity(*parts: object) -> str:
    """A hash of JSON values."""
    return json_hash(parts)


def kept(path: Path, schema: type[_StateRecord], made_for: str) -> _StateRecord | None:
    """The record at `path`; None where it is missing, damaged, or was made for something else."""
    try:
        record = read_record(path, schema, DataError, "it is made again")
    except (FileNotFoundError, DataError):
        return None
    return record if record.made_for == made_for else None


class InputHash(StateRecord):
    """The SHA-256 of an input file."""

    sha256: str


def input_hash(state: Path, plan: str, task: tuple[int, Path]) -> tuple[int, str]:
    """The number of an input file and its SHA-256, computed once for the plan with the identity `plan`."""
    index, path = task
    cached, made_for = state / f"{index:05d}.sha256.json", identity(plan, index)
    record = kept(cached, InputHash, made_for)
    if record is None:
        record = InputHash(made_for=made_for, sha256=file_hash(path))
        write_record(cached, record)
    return index, record.sha256


class PartCounts(BaseModel):
    """What one unit contributed to the train or to the held-out part."""

    model_config = ConfigDict(extra="forbid")

    documents: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    characters: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    prompt_tokens: NonNegativeInt = 0
    prompt_bytes: NonNegativeInt = 0


class UnitPart(PartCounts):
    """The same, with what the files of its shard hold, by the ends of their names; none without documents."""

    files: dict[ShardFile, FileContent] = {}


class UnitRecord(StateRecord):
    """The outcome of a unit. Its file is written after all other files of the unit, and marks the unit as done."""

    backend: str
    train: UnitPart
    heldout: UnitPart = UnitPart()
    rejected: dict[str, NonNegativeInt] = {}
    quarantine: FileContent | None = None

    @property
    def records(self) -> int:
        """The number of records read, good and bad."""
        return self.train.documents + self.heldout.documents + sum(self.rejected.values())


@dataclass(frozen=True)
class UnitState:
    """The files of one unit: those in the state, and its shards in the folders of the parts."""

    name: str
    made_for: str
    state: Path
    train: Path
    heldout: Path | None = None

    def __str__(self) -> str:
        return str(self.train / self.name)

    @property
    def record_file(self) -> Path:
        """Its record."""
        return self.state / f"{self.name}.json"

    @property
    def quarantine_file(self) -> Path:
        """Its rejected records, if there are any."""
        return self.state / f"{self.name}.quarantine.jsonl"

    def outcome(self) -> UnitRecord | None:
        """The record of the unit, if it is done and its files have their sizes."""
        record = kept(self.record_file, UnitRecord, self.made_for)
        return record if record is not None and self._is_intact(record, sizes_only=True) else None

    def forget_if_damaged(self) -> bool:
        """Compares every byte of the unit's files, and removes its record if one differs; returns whether it did."""
        record = kept(self.record_file, UnitRecord, self.made_for)
        if record is None or self._is_intact(record):
            return False
        self.record_file.unlink(missing_ok=True)
        return True

    def _is_intact(self, record: UnitRecord, *, sizes_only: bool = False) -> bool:
        try:
            for path, content in self._files(record):
                check_file(path, content, "it is made again", blocks=() if sizes_only else None)
        except DataError:
            return False
        return True

    def _files(self, record: UnitRecord) -> Iterator[tuple[Path, FileContent]]:
        for folder, part in ((self.train, record.train), (self.heldout, record.heldout)):
            if folder is not None:
                yield from ((folder / f"{self.name}{suffix}", content) for suffix, content in part.files.items())
        if record.quarantine is not None:
            yield self.quarantine_file, record.quarantine


def check_finished_units(units: Sequence[UnitState], workers: Workers, share: tuple[int, int]) -> None:
    """Compares all files of the units that are done with their records; a unit that differs is to be done again.

    Each of the jobs that share the work compares its own units: the corpus is read once, however many there are.
    """
    k, n = share
    begun = {path.name for state in {unit.state for unit in units} for path in state.glob("*.json")}
    done = [unit for unit in units[k::n] if unit.record_file.name in begun]
    damaged = 0
    with progress_bar("checking finished units", len(done), " units") as bar:
        for was_damaged in workers.run(UnitState.forget_if_damaged, done):
            damaged += was_damaged
            bar.update(1)
    if damaged:
        _logger.warning("%d of %d finished units are damaged and are made again", damaged, len(done))


def sums_of(shards: Sequence[tuple[str, UnitPart]]) -> dict[str, Any]:
    """The fields of a manifest that follow from its shards, given by their names and counts; empty ones are omitted."""
    total = PartCounts(**{name: sum(getattr(counts, name) for _, counts in shards) for name in PartCounts.model_fields})
    return {
        **total.model_dump(),
        "tokens_per_character": round(total.tokens / max(total.characters, 1), 6),
        "tokens_per_byte": round(total.tokens / max(total.bytes, 1), 6),
        "shards": [
            ShardRecord(name=name, documents=part.documents, tokens=part.tokens, files=part.files)
            for name, part in shards
            if part.documents
        ],
    }


# --- Who does what ---------------------------------------------------------------------------------------------------


def own_first(tasks: Sequence[_T], share: tuple[int, int]) -> list[_T]:
    """The tasks in the order of the k-th of n jobs, `share` (k, n), that make a corpus together.

    First come its own, then the other jobs' tasks from the end, which those jobs reach last.
    """
    k, n = share
    others = [task for at, task in enumerate(tasks) if at % n != k]
    return [*tasks[k::n], *reversed(others)]
