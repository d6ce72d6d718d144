"""The machine of all jobs that fill a corpus folder: units of work, by any number of workers and jobs, restartable.

`<folder>/.units` holds plan.json, what the folder was begun for, and a record of each finished unit. A record is
written after all other files of its unit, so a unit without one is done again, to the same bytes. A job that continues
compares the files with their records, and does a unit again of which a file is missing or differs. manifest.json
completes the corpus, and the folder `.units` is removed. What is done in a unit: `preprocess`, `rehearsal.corpus`.
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
_MOST_NAMED = 5
"""Of what is done again, so many are named in the log."""
_logger = log.get_logger(__name__)

Share = tuple[int, int]
"""(k, n): the k-th of n jobs that make a corpus together. It begins with its own units, but can do all of them."""


class Plan(Description):
    """What a folder is begun for. A job with another plan must not continue there.

    `unit_size` is in bytes of text, or in tokens that a base writes. `version` is of how units are cut.
    """

    inputs: list[tuple[str, int]]
    unit_size: int
    version: int = 1


class UnitPart(Counts):
    """What one unit contributed to the train or to the held-out part. `files` is of its shard, if it has documents."""

    files: dict[ShardFile, FileContent] = Field(default_factory=dict)


class Outcome(BaseModel):
    """What is recorded of a finished unit, of any kind of work."""

    unit: str = ""
    """its name"""
    plan: str = ""
    """the hash of the plan.json that it was done for"""

    def written(self, state: Path, name: str) -> Iterator[tuple[Path, FileContent]]:
        """The files that the unit `name` has written beside its record in `state`, and what they must hold."""
        yield from ()


class UnitRecord(Outcome):
    """The outcome of a unit that writes tokens.

    `quarantine` is of its list of rejected records, `letters` of the hashes of its documents' letters, if it has any.
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
    """The hashes of the letters of the training documents of the unit `name`, for copies in held-out text."""
    return state / f"{name}.letters.npy"


@dataclass(frozen=True)
class Work:
    """A unit: its name, its size in what the progress bar counts, and the file that a message about it names."""

    name: str
    size: int
    path: str

    def __str__(self) -> str:
        return self.path


_Unit = TypeVar("_Unit", bound=Work)
_Record = TypeVar("_Record", bound=Outcome)


def complete(output: Path, plan: Plan, make: Callable[[Path], Manifest]) -> Manifest:
    """Makes the corpus of `plan` in the folder `output`, or continues it; a finished one is left as it is.

    `make` fills the folder, with the folder of unfinished work as argument.

    Raises:
        OutputError: one of the folders holds something else.
        DataError: the folder holds or was begun for another corpus.
    """
    _forget_without_documents(output, plan)
    if (manifest := finished(output, plan)) is not None:
        _logger.info(
            "%s: already complete, %d documents, %d tokens",
            output,
            manifest.documents,
            manifest.tokens,
        )
    else:
        try:
            _begin(output, plan)
            # Another job may have begun another corpus here, or finished this one, since the first look.
            with _at_work(output):
                if (manifest := finished(output, plan)) is None:
                    manifest = make(output / STATE)
                    publish(manifest, output)
        except (FileNotFoundError, DataError) as fault:
            # Another job that shares the work may have finished, and removed the state.
            if not (output / MANIFEST).exists() or (manifest := finished(output, plan)) is None:
                if isinstance(fault, FileNotFoundError):
                    raise DataError(
                        f"{fault.filename}: vanished during the work; put it back"
                    ) from None
                raise
    with contextlib.suppress(OSError):  # another job is doing the same
        shutil.rmtree(
            rename_aside(output / STATE), ignore_errors=True
        )  # renamed first: another job may be reading it
    return manifest


def _begin(output: Path, plan: Plan) -> None:
    """Makes the folders, and the state with the plan, where no other job has."""
    folders = _folders(output, plan)
    for folder in folders:
        try:
            check_replaceable(folder, CORPUS)
        except OutputError:
            if not (output / STATE).is_dir():  # begun, perhaps by another job at this moment
                raise
    for folder in folders:
        Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)  # through a link
    (output / STATE).mkdir(exist_ok=True)
    own = own_temporary(output / STATE / _PLAN)
    write_record(own, plan)
    publish_first(own, output / STATE / _PLAN)  # of two jobs that begin at once one is first


@contextlib.contextmanager
def _at_work(output: Path) -> Iterator[None]:
    """Holds a lock on the plan that any number of jobs share, so that none removes the state of another."""
    with (output / STATE / _PLAN).open("rb") as plan:
        with contextlib.suppress(
            OSError
        ):  # a file system without locks; there nothing is forgotten
            fcntl.flock(plan, fcntl.LOCK_SH)
        yield


def _forget_without_documents(output: Path, plan: Plan) -> None:
    """Removes the state of a corpus that was begun otherwise, if no document was written and no job is at work.

    So settings under which no document was found, such as another text key, can be corrected.
    """
    state = output / STATE
    try:
        found = begun(output)
        if (
            not isinstance(found, Plan)
            or found == plan
            or (found.sampling is None) != (plan.sampling is None)
        ):
            return
        if (
            found.tokenizer.backend != plan.tokenizer.backend
        ):  # an encoder that erred: the user is to know
            return
        with (state / _PLAN).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _has_documents(output):
                _logger.info("%s: holds no document of what was begun; it is begun anew", output)
                shutil.rmtree(rename_aside(state), ignore_errors=True)
    except OSError:  # another job is at work there, or finished it, or the file system has no locks
        return


def _has_documents(output: Path) -> bool:
    """Whether a unit of the corpus wrote documents."""
    folders = output, heldout_of(output)
    return any(next(folder.glob("*.bin"), None) is not None for folder in folders)


def finished(output: Path, plan: Plan) -> Manifest | None:
    """The manifest of the corpus in `output`, if it is complete.

    Raises DataError where it is another corpus than that of `plan`, was begun as another one, or is damaged.
    """
    found = begun(output)
    if found is not None:
        _check_same(output, plan, found)
    folders = _folders(output, plan)
    if not isinstance(found, Manifest) or not all(
        (folder / MANIFEST).exists() for folder in folders
    ):
        return None
    for folder in folders:
        check_finished(folder)
    return found


def begun(output: Path) -> Manifest | Plan | None:
    """The manifest of the corpus in `output`, of an unfinished one its plan; None where none was begun."""
    if (output / MANIFEST).exists():
        return load_manifest(output)
    try:
        return read_record(
            output / STATE / _PLAN, Plan, DataError, f"remove {output} to start again"
        )
    except FileNotFoundError:
        return None


def _folders(output: Path, plan: Plan) -> list[Path]:
    return [output, heldout_of(output)] if plan.heldout_fraction else [output]


def _check_same(output: Path, plan: Plan, found: Plan | Manifest) -> None:
    if (plan.sampling is None) != (found.sampling is None):
        tool = "scale-cpt tokenize" if plan.sampling is None else "scale-cpt sample"
        raise DataError(
            f"{output}: was not made by {tool}; choose another --output, or another name for the corpus"
        )
    terms = _terms(found)
    for name, expected in _terms(plan).items():
        if name in terms and expected != terms[name]:
            folders = "this folder"
            if plan.heldout_fraction > 0 or heldout_of(output).exists():
                folders = f"this folder and {heldout_of(output).name}"
            raise DataError(
                f"{output}: was begun with another {name.replace('_', ' ')}: "
                f"expected {expected!r:.120}, found {terms[name]!r:.120}; set it back, or "
                f"remove {folders} to make the corpus again, or choose another --output"
            )


def _terms(made: Plan | Manifest) -> dict[str, Any]:
    """What may not differ between two attempts, by name."""
    fields = made.model_dump(include=set(Plan.model_fields))
    tokenizer, sampling = fields.pop("tokenizer"), fields.pop("sampling") or {}
    if isinstance(
        made, Manifest
    ):  # it does not say how the work was divided, and either encoder may have made it
        fields["inputs"] = [(file.path, file.bytes) for file in made.inputs]
        del tokenizer["backend"], fields["heldout_by"]
        if fields["special_tokens"] is None:  # an earlier version made it
            del fields["special_tokens"]
    return {**tokenizer, **sampling, **fields}  # the size of units, which others decide, comes last


def check_finished(folder: Path, *, sampled: int | None = SAMPLED_BYTES) -> None:
    """Compares the corpus in `folder`, or an empty held-out part, with its manifest: see TokenCorpus.check."""
    if load_manifest(folder).tokens:
        TokenCorpus(folder).check(sampled=sampled)


def publish(manifest: Manifest, folder: Path) -> None:
    """Writes the manifest of a part, which completes it.

    Raises DataError where a shard is missing or of another size, as after somebody tidied up during the work.
    """

    def check(shard: ShardRecord) -> None:
        for end, content in shard.files.items():
            check_file(
                shard_file(folder / shard.name, end), content, f"start again: {_AGAIN}", whole=False
            )

    for _ in in_threads(check, manifest.shards):
        pass
    manifest.save(folder)


def heldout_of(output: Path) -> Path:
    return output.with_name(output.name + ".heldout")


def run_units(
    state: Path,
    schema: type[_Record],
    work: Callable[[_Unit], _Record],
    units: Sequence[_Unit],
    workers: Workers,
    share: Share = (0, 1),
    *,
    what: str,
    measured_in: str = "B",
) -> Iterator[tuple[str, _Record]]:
    """The name and the record of every unit; those that are done first, then the others as they are finished.

    Args:
        state: the folder of the records, which are of type `schema`.
        work: does a unit, and returns its record.
        share: this job's. Its own units come first, then the others' from the end, which those jobs reach last.
        what, measured_in: what is done, and the unit of the sizes, for the progress bar.
    """
    records = _Records(state, schema, file_hash(state / _PLAN), _time_of(state))
    sizes = {unit.name: unit.size for unit in units}
    with os.scandir(state) as entries:
        recorded = {entry.name for entry in entries}
    found = [unit for unit in units if f"{unit.name}.json" in recorded]
    done: set[str] = set()
    faults: list[str] = []
    if found:
        # By all workers: hashing the files takes as long as reading them.
        with progress_bar("checking finished units", len(found), " units") as checked:
            for kept in workers.run(records.kept, _in_turn(found, share)):
                checked.update(1)
                if kept.record is not None:
                    done.add(kept.name)
                    yield kept.name, kept.record
                elif kept.fault:
                    faults.append(kept.fault)
    warn_of_repeats(faults)
    left = [unit for unit in units if unit.name not in done]
    with progress_bar(
        what, sum(sizes.values()), measured_in, done=sum(sizes[name] for name in done)
    ) as progress:
        for name, record in workers.run(partial(_do, records, work), _in_turn(left, share)):
            progress.update(sizes[name])
            yield name, record


def _in_turn(units: Sequence[_Unit], share: Share) -> list[_Unit]:
    """This job's own units, then the others' from the end, which those jobs reach last."""
    k, n = share
    return [*units[k::n], *reversed([unit for at, unit in enumerate(units) if at % n != k])]


def warn_of_repeats(faults: Sequence[str]) -> None:
    """Says why work is done again; of many alike, the first."""
    for fault in faults[:_MOST_NAMED]:
        _logger.warning("%s", fault)
    if len(faults) > _MOST_NAMED:
        _logger.warning("%d others are done again, for like reasons", len(faults) - _MOST_NAMED)


def _time_of(state: Path) -> int:
    """Now, in nanoseconds, by the clock that gives the files in `state` their times: machines may differ."""
    with tempfile.NamedTemporaryFile(dir=state, prefix=".now.") as file:
        return os.fstat(file.fileno()).st_mtime_ns


@dataclass(frozen=True)
class _Kept(Generic[_Record]):
    """A unit that was found: its record, or None and the reason for which it is done again, if there is any."""

    name: str
    record: _Record | None
    fault: str = ""


@dataclass(frozen=True)
class _Records(Generic[_Record]):
    """The records of finished units in `state`, of the type `schema`, made for the plan of that hash."""

    state: Path
    schema: type[_Record]
    plan: str
    began: int
    """when this job began to look at them: later records are compared by another job, or were just written"""

    def kept(self, unit: Work) -> _Kept[_Record]:
        """The record of `unit`, if it is sound and its files are as they were written.

        Sizes are always compared, and hashes where no other job has compared them since this one began.
        """
        path = self.path_of(unit.name)
        try:
            changed = path.stat().st_mtime_ns
            record = read_record(path, self.schema, DataError, _AGAIN, needs_checksum=True)
            if (record.unit, record.plan) != (unit.name, self.plan):
                raise DataError(f"{path}: is of another unit, or of another {_PLAN}; {_AGAIN}")
            for file, content in record.written(self.state, unit.name):
                check_file(file, content, _AGAIN, whole=changed <= self.began)
        except FileNotFoundError:
            return _Kept(unit.name, None)
        except DataError as fault:
            return _Kept(unit.name, None, str(fault))
        if changed <= self.began:
            with contextlib.suppress(
                OSError
            ):  # another user's file, or gone since: others compare it, too
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
    record = records.kept(unit).record  # another job may have done it
    return unit.name, records.write(unit.name, work(unit)) if record is None else record


def manifest_of(
    plan: Plan,
    part: str,
    shards: Mapping[str, UnitPart],
    inputs: list[InputFile],
    rejected: Mapping[str, int] = {},
) -> Manifest:
    """The manifest of a part of the corpus of `plan`; `shards` are its units, by their names."""
    counts = {
        name: sum(getattr(unit, name) for unit in shards.values()) for name in Counts.model_fields
    }
    return Manifest(
        part=part,
        **plan.model_dump(exclude={"inputs", "unit_size", "version"}),
        **counts,
        token_dtype=token_dtype(plan.tokenizer.vocab_size).name,
        tokens_per_character=round(counts["tokens"] / max(counts["characters"], 1), 6),
        tokens_per_byte=round(counts["tokens"] / max(counts["bytes"], 1), 6),
        rejected=dict(sorted(rejected.items())),
        inputs=inputs,
        shards=[
            ShardRecord(name=name, documents=unit.documents, tokens=unit.tokens, files=unit.files)
            for name, unit in shards.items()
            if unit.documents
        ],
    )
