"""The jobs that fill a corpus folder: in units of work, by any number of workers and jobs at once, restartable.

`<folder>/.units` holds plan.json, what the folder was begun for, and a record of each finished unit. A record is
written after all other files of its unit, so a unit without one is done again, to the same bytes. manifest.json
completes the corpus, and the folder `.units` is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from pipeline import log
from pipeline.data.file_content import FileContent, check_file
from pipeline.data.token_corpus import (
    CORPUS,
    MANIFEST,
    SAMPLED_BLOCKS,
    InputFile,
    Manifest,
    ShardRecord,
    TokenCorpus,
    load_manifest,
)
from pipeline.data.token_shards import ShardFile
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import check_replaceable, file_hash, read_record, rename_aside, write_record
from pipeline.log import progress_bar

STATE = ".units"
"""The folder of unfinished work, in a corpus's own."""
QUARANTINE = "quarantine.jsonl"
"""The rejected records, in a corpus's folder."""
_PLAN = "plan.json"
_logger = log.get_logger(__name__)

Share = tuple[int, int]
"""(k, n): the k-th of n jobs that make a corpus together. It begins with its own units, but can do all of them."""
_Unit = TypeVar("_Unit")
_Record = TypeVar("_Record", bound=BaseModel)


class Plan(BaseModel):
    """What a folder is begun for. A job with another plan must not continue there."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tool: ClassVar[str]

    @abstractmethod
    def of_corpus(self, manifest: Manifest) -> Plan | None:
        """The plan of a finished corpus; what its manifest does not say is as here. None if another tool made it."""


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


class UnitRecord(BaseModel):
    """The outcome of a unit that writes tokens."""

    backend: str
    train: UnitPart
    heldout: UnitPart = UnitPart()
    rejected: dict[str, NonNegativeInt] = {}

    @property
    def records(self) -> int:
        """The number of records read, good and bad."""
        return self.train.documents + self.heldout.documents + sum(self.rejected.values())


class _InputHash(BaseModel):
    sha256: str


def complete(output: Path, plan: Plan, make: Callable[[Path], Manifest], heldout: Path | None = None) -> Manifest:
    """Makes the corpus of `plan`, or continues it; a finished one is left as it is.

    Args:
        output: its folder.
        plan: what it is.
        make: fills the folder, with the folder of unfinished work as argument.
        heldout: another folder that it fills.

    Raises:
        OutputError: one of the folders holds something else.
        DataError: the folder cannot be made, or holds or was begun for another corpus.
    """
    state = output / STATE
    if (manifest := finished(output, plan)) is not None:
        _logger.info("%s: already complete, %d documents, %d tokens", output, manifest.documents, manifest.tokens)
    else:
        try:
            for folder in () if state.is_dir() else filter(None, (output, heldout)):
                check_replaceable(folder, CORPUS)
            if state.is_symlink():
                raise DataError(f"{state}: is a link, and a corpus is made inside its folder only; remove it")
            for folder in filter(None, (state, heldout)):
                make_folder(folder)
            _write_plan(state, plan)
            # Another job may have begun another corpus here, or finished this one, since the first look.
            manifest = finished(output, plan) or make(state)
            manifest.save(output)
        except (FileNotFoundError, DataError) as error:
            # Another job that shares the work may have finished and removed the state.
            with contextlib.suppress(DataError):
                if (output / MANIFEST).exists() and (manifest := finished(output, plan)) is not None:
                    return manifest
            if isinstance(error, FileNotFoundError):
                raise DataError(f"{error.filename}: vanished during the work; start again") from None
            raise
    with contextlib.suppress(OSError):  # another job is doing the same
        shutil.rmtree(rename_aside(state), ignore_errors=True)  # renamed first, because another job may be reading it
    return manifest


def finished(output: Path, plan: Plan) -> Manifest | None:
    """The manifest of the corpus in `output`, if it is complete.

    Raises:
        DataError: it is another corpus than that of `plan`, was begun as another one, or is damaged.
    """
    if not (output / MANIFEST).exists():
        if (begun := read_plan(output, type(plan))) is not None:
            _check_same_plan(output, plan, begun)
        return None
    manifest = load_manifest(output, made_by=plan.tool)
    if (found := plan.of_corpus(manifest)) is None:
        raise DataError(
            f"{output}: was not made by {plan.tool}; choose another --output, or another name for the corpus"
        )
    _check_same_plan(output, plan, found)
    check_finished(output)
    if manifest.heldout_fraction > 0 and manifest.part == "train":
        try:
            check_finished(heldout_of(output))
        except DataError as error:
            raise DataError(f"{error}; it is made together with {output}: remove both folders") from None
    return manifest


def _write_plan(state: Path, plan: Plan) -> None:
    """Writes the plan unless there is one: of two jobs that begin at once, one wins."""
    own = state / f"{_PLAN}.{socket.gethostname()}.{os.getpid()}"
    write_record(own, plan)
    try:
        os.link(own, state / _PLAN)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        own.replace(state / _PLAN)
    own.unlink(missing_ok=True)


def read_plan(output: Path, kind: type[_Record]) -> _Record | None:
    """The plan that the unfinished corpus in `output` was begun for; None where none was.

    Raises:
        DataError: it is damaged, or of another kind: another tool is making a corpus there.
    """
    if not (output / STATE).is_dir():
        return None
    advice = f"choose another --output if another tool is making a corpus there, else remove {output} to start again"
    try:
        return read_record(output / STATE / _PLAN, kind, DataError, advice)
    except FileNotFoundError:
        return None


def _check_same_plan(output: Path, expected: Plan, found: Plan) -> None:
    for name in type(expected).model_fields:
        values = [repr(getattr(plan, name)) for plan in (expected, found)]
        if values[0] != values[1]:
            shown = [value if len(value) <= 120 else value[:117] + "..." for value in values]
            raise DataError(
                f"{output}: was begun with another {name.replace('_', ' ')}: expected {shown[0]}, found "
                f"{shown[1]}; set it back, or remove this folder and {output.name}.heldout to make the corpus again, "
                "or choose another --output"
            )


def check_finished(folder: Path, *, blocks: int | None = SAMPLED_BLOCKS) -> None:
    """Compares the corpus in `folder` with its manifest, with as many blocks of tokens; see TokenCorpus.check.

    Raises:
        DataError: it is damaged.
    """
    manifest = load_manifest(folder)
    if manifest.tokens:  # a held-out part may be empty
        TokenCorpus(folder).check(blocks=blocks)
    # One that the user has removed is not missed.
    if manifest.quarantine is not None and (folder / QUARANTINE).exists():
        check_file(folder / QUARANTINE, manifest.quarantine, "remove it, or restore it")
    if not manifest.knows_content:
        _logger.warning("%s: was made without hashes of its files; only sizes and indexes were checked", folder)


def heldout_of(output: Path) -> Path:
    """The folder of the held-out part of the corpus in `output`."""
    return output.with_name(output.name + ".heldout")


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, unless it exists. Raises DataError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot make this folder ({error.strerror}); choose another --output"
        ) from None


# --- Units of work ---------------------------------------------------------------------------------------------------


def run_units(
    state: Path,
    schema: type[_Record],
    work: Callable[[_Unit], _Record],
    units: Mapping[str, _Unit],
    workers: Workers,
    share: Share = (0, 1),
    *,
    bar: tuple[str, str, Callable[[_Unit], float]],
) -> Iterator[tuple[str, _Record]]:
    """The name and the record of every unit; those that are done first, then the others as they are finished.

    Args:
        state: the folder of the records.
        schema: their type.
        work: does a unit, and returns its record.
        units: all of them, by their names.
        workers: the processes that do the work.
        share: this job's.
        bar: for the progress bar: what is done, and the unit and function of a unit's size.
    """
    what, of_size, size = bar
    done = {name: record for name in units if (record := _record_of(state, schema, name)) is not None}
    yield from done.items()
    left = [(name, unit) for name, unit in units.items() if name not in done]
    sizes = {name: size(unit) for name, unit in units.items()}
    with progress_bar(what, sum(sizes.values()), of_size, done=sum(sizes[name] for name in done)) as progress:
        finished_units = workers.run(partial(_do, state, schema, work), share_first(left, share), name=itemgetter(1))
        for name, record in finished_units:
            progress.update(sizes[name])
            yield name, record


def _do(
    state: Path, schema: type[_Record], work: Callable[[_Unit], _Record], task: tuple[str, _Unit]
) -> tuple[str, _Record]:
    name, unit = task
    record = _record_of(state, schema, name)  # another job may have done it
    if record is None:
        record = work(unit)
        write_record(state / f"{name}.json", record)
    return name, record


def _record_of(state: Path, schema: type[_Record], name: str) -> _Record | None:
    try:
        return read_record(state / f"{name}.json", schema, DataError)
    except (FileNotFoundError, DataError):  # a damaged one is made again
        return None


def share_first(tasks: Sequence[_Unit], share: Share) -> list[_Unit]:
    """A job's own tasks, then the other jobs' from the end, which those jobs reach last."""
    k, n = share
    others = [task for at, task in enumerate(tasks) if at % n != k]
    return [*tasks[k::n], *reversed(others)]


def input_records(state: Path, inputs: Sequence[tuple[str, int]], workers: Workers, share: Share) -> list[InputFile]:
    """The input files (path, bytes) with their hashes."""
    files = {f"{number:05d}.sha256": path for number, (path, _) in enumerate(inputs)}
    size = dict(inputs).__getitem__
    found = dict(run_units(state, _InputHash, _hashed, files, workers, share, bar=("hashing", "B", size)))
    return [InputFile(path=path, bytes=size(path), sha256=found[name].sha256) for name, path in files.items()]


def _hashed(path: str) -> _InputHash:
    return _InputHash(sha256=file_hash(Path(path)))


def sums_of(shards: Mapping[str, UnitPart]) -> dict[str, Any]:
    """The fields of a manifest that follow from its shards, by their names; empty ones are omitted."""
    total = PartCounts(
        **{name: sum(getattr(part, name) for part in shards.values()) for name in PartCounts.model_fields}
    )
    return {
        **total.model_dump(),
        "tokens_per_character": round(total.tokens / max(total.characters, 1), 6),
        "tokens_per_byte": round(total.tokens / max(total.bytes, 1), 6),
        "shards": [
            ShardRecord(name=name, documents=part.documents, tokens=part.tokens, files=part.files)
            for name, part in shards.items()
            if part.documents
        ],
    }
