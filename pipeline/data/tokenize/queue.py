"""The queue of every job that fills a corpus folder: units of work, for any number of workers and
jobs, restartable.

`<folder>/.units` holds plan.json, what the folder was begun for, and a record of each finished
unit. A record is written after all other files of its unit, so a unit without one is done again, to
the same bytes. A job that continues compares the files with their records, and does a unit again of
which a file is missing or differs. manifest.json completes the corpus, and the folder `.units` is
removed. What is done in a unit: `tokenize.job` tokenizes files, `self_generated.corpus` samples
text from the base.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, Field, NonNegativeInt

from pipeline import log
from pipeline.data.corpus.indexed_dataset import (
    FileContent,
    ShardFile,
    check_file,
    shard_file,
    token_dtype,
)
from pipeline.data.corpus.manifest import (
    CORPUS,
    MANIFEST,
    Counts,
    Description,
    InputFile,
    Manifest,
    ShardRecord,
    load_manifest,
)
from pipeline.data.corpus.token_corpus import SAMPLED_BYTES, TokenCorpus
from pipeline.data.tokenize.workers import Workers
from pipeline.errors import DataError, OutputError
from pipeline.files import (
    check_replaceable,
    file_hash,
    in_threads,
    own_temporary,
    publish_first,
    read_record,
    rename_aside,
    write_record,
)
from pipeline.log import progress_bar

STATE = ".units"
"""The folder of unfinished work, in a corpus's own."""
QUARANTINE = "quarantine.jsonl"
"""The rejected records, in a corpus's folder."""
_PLAN = "plan.json"
_AGAIN = "its unit is done again"
# Of what is done again, so many are named in the log.
_MOST_NAMED = 5
_logger = log.get_logger(__name__)

JobShare = tuple[int, int]
"""(k, n): the k-th of n jobs that make a corpus together, from 0.

A job begins with its own units, but can do all of them.
"""


class CorpusPlan(Description):
    """What a folder is begun for. A job with another plan must not continue there.

    `unit_size` is in bytes of text, or in tokens that a base writes. `version` counts the ways in
    which units have been cut.
    """

    inputs: list[tuple[str, int]]
    unit_size: int
    version: int = 1


class UnitPart(Counts):
    """What one unit contributed to the train or to the held-out part.

    `files` are the contents of its shard's files, if it has documents.
    """

    files: dict[ShardFile, FileContent] = Field(default_factory=dict)


class UnitOutcome(BaseModel):
    """What is recorded of a finished unit, of any kind of work."""

    unit: str = ""
    """its name"""
    plan: str = ""
    """the hash of the plan.json that it was done for"""

    def written(self, state: Path, name: str) -> Iterator[tuple[Path, FileContent]]:
        """The files that the unit `name` wrote beside its record in `state`, and their contents."""
        yield from ()


class UnitRecord(UnitOutcome):
    """The outcome of a unit that writes tokens.

    `quarantine` is the content of its list of rejected records, `letters` of the hashes of its
    documents' letters, where there are any.
    """

    train: UnitPart
    heldout: UnitPart = UnitPart()
    rejected: dict[str, NonNegativeInt] = {}
    quarantine: FileContent | None = None
    letters: FileContent | None = None

    def written(self, state: Path, name: str) -> Iterator[tuple[Path, FileContent]]:
        output = state.parent
        for folder, part in ((output, self.train), (heldout_of(output), self.heldout)):
            for end, content in part.files.items():
                yield shard_file(folder / name, end), content
        if self.quarantine is not None:
            yield quarantine_of(state, name), self.quarantine
        if self.letters is not None:
            yield letters_of(state, name), self.letters


def quarantine_of(state: Path, name: str) -> Path:
    """The list of the records that the unit `name` rejected."""
    return state / f"{name}.{QUARANTINE}"


def letters_of(state: Path, name: str) -> Path:
    """The hashes of the letters of the unit's training documents, by which copies are found."""
    return state / f"{name}.letters.npy"


@dataclass(frozen=True)
class WorkUnit:
    """A unit: its name, its size as the progress bar counts it, and the file that messages name."""

    name: str
    size: int
    path: str

    def __str__(self) -> str:
        return self.path


_Unit = TypeVar("_Unit", bound=WorkUnit)
_Record = TypeVar("_Record", bound=UnitOutcome)


def complete(output: Path, plan: CorpusPlan, make: Callable[[Path], Manifest]) -> Manifest:
    """Makes the corpus of `plan` in the folder `output`, or continues it; a finished one is left as
    it is.

    `make` fills the folder, with the folder of unfinished work as argument.

    Raises:
        OutputError: one of the folders holds something else.
        DataError: the folder holds or was begun for another corpus.
        FileNotFoundError: somebody removed a file during the work.
    """
    _forget_without_documents(output, plan)
    manifest = finished(output, plan)
    if manifest is None:
        manifest = _make_or_wait(output, plan, make)
    else:
        counted = (manifest.documents, manifest.tokens)
        _logger.info("%s: already complete, %d documents, %d tokens", output, *counted)
    # Another job may be removing the state, too. It is renamed first, because a job that still
    # reads it should find either all of it or nothing.
    with contextlib.suppress(OSError):
        shutil.rmtree(rename_aside(output / STATE), ignore_errors=True)
    return manifest


def _make_or_wait(output: Path, plan: CorpusPlan, make: Callable[[Path], Manifest]) -> Manifest:
    """Makes the corpus, unless another job that shares the work finishes it first."""
    try:
        _begin(output, plan)
        with _at_work(output):
            # Another job may have begun another corpus here, or finished this one, since the first
            # look.
            manifest = finished(output, plan)
            if manifest is None:
                manifest = make(output / STATE)
                publish(manifest, output)
            return manifest
    except (FileNotFoundError, DataError) as fault:
        # The other job removes the state when it has finished: then nothing is wrong.
        if (output / MANIFEST).exists():
            manifest = finished(output, plan)
            if manifest is not None:
                return manifest
        if isinstance(fault, FileNotFoundError):
            raise DataError(f"{fault.filename}: vanished during the work; put it back") from None
        raise


def _begin(output: Path, plan: CorpusPlan) -> None:
    """Makes the folders, and the state with the plan, where no other job has."""
    folders = _folders(output, plan)
    for folder in folders:
        try:
            check_replaceable(folder, CORPUS)
        except OutputError:
            # A folder with a state was begun, perhaps by another job at this moment.
            if not (output / STATE).is_dir():
                raise
    for folder in folders:
        # The folder may be a link whose target does not exist yet, as on a scratch file system.
        Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
    (output / STATE).mkdir(exist_ok=True)
    own = own_temporary(output / STATE / _PLAN)
    write_record(own, plan)
    # Of two jobs that begin at once, the plan of the first stays.
    publish_first(own, output / STATE / _PLAN)


@contextlib.contextmanager
def _at_work(output: Path) -> Iterator[None]:
    """Holds a lock on the plan that any number of jobs share, so that none removes the state of
    another."""
    with (output / STATE / _PLAN).open("rb") as plan:
        # A file system may have no locks. Nothing is forgotten there: see below.
        with contextlib.suppress(OSError):
            fcntl.flock(plan, fcntl.LOCK_SH)
        yield


def _forget_without_documents(output: Path, plan: CorpusPlan) -> None:
    """Removes the state of a corpus that was begun otherwise and has no document yet.

    So settings under which no document was found, such as another text key, can be corrected. The
    state stays while a job is at work.
    """
    state = output / STATE
    # An OSError means: another job is at work there, or finished it, or the file system has no
    # locks.
    with contextlib.suppress(OSError):
        found = begun(output)
        if not isinstance(found, CorpusPlan) or found == plan:
            return
        if (found.sampling is None) != (plan.sampling is None):
            return
        if found.tokenizer.backend != plan.tokenizer.backend:
            # The fast encoder erred in that job, and the user is to remove the folder knowingly.
            return
        with (state / _PLAN).open("rb") as lock:
            # Exclusive, so that it fails while any job holds its share of the lock. The kernel
            # releases the locks of a killed job.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _has_documents(output):
                _logger.info("%s: holds no document of what was begun; it is begun anew", output)
                shutil.rmtree(rename_aside(state), ignore_errors=True)


def _has_documents(output: Path) -> bool:
    """Whether a unit of the corpus wrote documents."""
    for folder in (output, heldout_of(output)):
        if next(folder.glob("*.bin"), None) is not None:
            return True
    return False


def finished(output: Path, plan: CorpusPlan) -> Manifest | None:
    """The manifest of the corpus in `output`, if it is complete.

    Raises:
        DataError: it is another corpus than that of `plan`, was begun as another one, or is
            damaged.
    """
    found = begun(output)
    if found is not None:
        _check_same(output, plan, found)
    if not isinstance(found, Manifest):
        return None
    folders = _folders(output, plan)
    for folder in folders:
        if not (folder / MANIFEST).exists():
            return None
    for folder in folders:
        check_finished(folder)
    return found


def begun(output: Path) -> Manifest | CorpusPlan | None:
    """The manifest of the corpus in `output`, of an unfinished one its plan; None for no corpus."""
    if (output / MANIFEST).exists():
        return load_manifest(output)
    path = output / STATE / _PLAN
    try:
        return read_record(path, CorpusPlan, DataError, f"remove {output} to start again")
    except FileNotFoundError:
        return None


def _folders(output: Path, plan: CorpusPlan) -> list[Path]:
    if plan.heldout_fraction:
        return [output, heldout_of(output)]
    return [output]


def _check_same(output: Path, plan: CorpusPlan, found: CorpusPlan | Manifest) -> None:
    if (plan.sampling is None) != (found.sampling is None):
        tool = "scale-cpt tokenize" if plan.sampling is None else "scale-cpt sample"
        raise DataError(
            f"{output}: was not made by {tool}; choose another --output, or another name for the "
            "corpus"
        )
    terms = _terms(found)
    for name, expected in _terms(plan).items():
        if name not in terms or expected == terms[name]:
            continue
        folders = "this folder"
        # A held-out part that is tokenized by itself has no held-out part of its own.
        if plan.heldout_fraction > 0 or heldout_of(output).exists():
            folders = f"this folder and {heldout_of(output).name}"
        raise DataError(
            f"{output}: was begun with another {name.replace('_', ' ')}: "
            f"expected {expected!r:.120}, found {terms[name]!r:.120}; set it back, or "
            f"remove {folders} to make the corpus again, or choose another --output"
        )


def _terms(made: CorpusPlan | Manifest) -> dict[str, Any]:
    """What may not differ between two attempts, by name."""
    fields = made.model_dump(include=set(CorpusPlan.model_fields))
    tokenizer = fields.pop("tokenizer")
    sampling = fields.pop("sampling") or {}
    if isinstance(made, Manifest):
        # A manifest does not say how the work was divided, and either encoder may have made it.
        # Held-out parts that earlier versions chose by the whole text stay valid.
        fields["inputs"] = [(file.path, file.bytes) for file in made.inputs]
        del tokenizer["backend"], fields["heldout_by"]
        if fields["special_tokens"] is None:
            # Earlier versions did not record it.
            del fields["special_tokens"]
    # The first difference is reported. The size of units, which follows from others, comes last.
    return {**tokenizer, **sampling, **fields}


def check_finished(folder: Path, *, sampled: int | None = SAMPLED_BYTES) -> None:
    """Compares the corpus in `folder`, or an empty held-out part, with its manifest: see
    TokenCorpus.check."""
    # An empty held-out part has no shards to open.
    if load_manifest(folder).tokens:
        TokenCorpus(folder).check(sampled=sampled)


def publish(manifest: Manifest, folder: Path) -> None:
    """Writes the manifest of a part, which completes it.

    Raises:
        DataError: a shard is missing or of another size, as after somebody tidied up during the
            work.
    """
    advice = f"start again: {_AGAIN}"

    def check(shard: ShardRecord) -> None:
        for end, content in shard.files.items():
            # Sizes alone: their hashes were made as they were written, and compared if the job was
            # continued.
            check_file(shard_file(folder / shard.name, end), content, advice, whole=False)

    for _ in in_threads(check, manifest.shards):
        pass
    manifest.save(folder)


def heldout_of(output: Path) -> Path:
    """The folder of the held-out part of the corpus in `output`."""
    return output.with_name(output.name + ".heldout")


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
    records = _Records(state, schema, file_hash(state / _PLAN), _time_of(state))
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
            record = read_record(path, self.schema, DataError, _AGAIN, needs_checksum=True)
            if (record.unit, record.plan) != (unit.name, self.plan):
                raise DataError(f"{path}: is of another unit, or of another {_PLAN}; {_AGAIN}")
            for file, content in record.written(self.state, unit.name):
                # A record that is younger than this job was written, or compared, by another one
                # meanwhile: hashing its files again would double the reading.
                check_file(file, content, _AGAIN, whole=changed <= self.began)
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


def manifest_of(
    plan: CorpusPlan,
    part: str,
    shards: Mapping[str, UnitPart],
    inputs: list[InputFile],
    rejected: Mapping[str, int] = {},
) -> Manifest:
    """The manifest of a part of the corpus of `plan`; `shards` are its units, by their names."""
    counts: dict[str, Any] = dict.fromkeys(Counts.model_fields, 0)
    records: list[ShardRecord] = []
    for name, unit in shards.items():
        for field in counts:
            counts[field] += getattr(unit, field)
        if unit.documents:
            record = ShardRecord(
                name=name, documents=unit.documents, tokens=unit.tokens, files=unit.files
            )
            records.append(record)
    return Manifest(
        part=part,
        # A manifest lists the inputs with their hashes, and not how the work was divided.
        **plan.model_dump(exclude={"inputs", "unit_size", "version"}),
        **counts,
        token_dtype=token_dtype(plan.tokenizer.vocab_size).name,
        # A part may be empty.
        tokens_per_character=round(counts["tokens"] / max(counts["characters"], 1), 6),
        tokens_per_byte=round(counts["tokens"] / max(counts["bytes"], 1), 6),
        rejected=dict(sorted(rejected.items())),
        inputs=inputs,
        shards=records,
    )
