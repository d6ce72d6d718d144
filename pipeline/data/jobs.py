"""The machine of all jobs that fill a corpus folder: units of work, by any number of workers and jobs, restartable.

`<folder>/.units` holds plan.json, what the folder was begun for, and a record of each finished unit. A record is
written after all other files of its unit, so a unit without one is done again, to the same bytes. manifest.json
completes the corpus, and the folder `.units` is removed. What is done in a unit: `preprocess`, `rehearsal.corpus`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, NonNegativeInt

from pipeline import log
from pipeline.data.token_corpus import (
    CORPUS,
    MANIFEST,
    SAMPLED_BYTES,
    Counts,
    Description,
    InputFile,
    Manifest,
    ShardRecord,
    TokenCorpus,
    load_manifest,
)
from pipeline.data.token_shards import FileContent, ShardFile, token_dtype
from pipeline.data.workers import Workers
from pipeline.errors import DataError, OutputError
from pipeline.files import (
    check_replaceable,
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


class UnitRecord(BaseModel):
    """The outcome of a unit that writes tokens."""

    train: UnitPart
    heldout: UnitPart = UnitPart()
    rejected: dict[str, NonNegativeInt] = {}


@dataclass(frozen=True)
class Work:
    """A unit: its name, its size in what the progress bar counts, and the file that a message about it names."""

    name: str
    size: int
    path: str

    def __str__(self) -> str:
        return self.path


_Unit = TypeVar("_Unit", bound=Work)
_Record = TypeVar("_Record", bound=BaseModel)


def complete(output: Path, plan: Plan, make: Callable[[Path], Manifest]) -> Manifest:
    """Makes the corpus of `plan` in the folder `output`, or continues it; a finished one is left as it is.

    `make` fills the folder, with the folder of unfinished work as argument.

    Raises:
        OutputError: one of the folders holds something else.
        DataError: the folder holds or was begun for another corpus.
    """
    if (manifest := finished(output, plan)) is not None:
        _logger.info("%s: already complete, %d documents, %d tokens", output, manifest.documents, manifest.tokens)
    else:
        try:
            _begin(output, plan)
            # Another job may have begun another corpus here, or finished this one, since the first look.
            manifest = finished(output, plan) or make(output / STATE)
            manifest.save(output)
        except (FileNotFoundError, DataError) as fault:
            # Another job that shares the work may have finished, and removed the state.
            if not (output / MANIFEST).exists() or (manifest := finished(output, plan)) is None:
                if isinstance(fault, FileNotFoundError):
                    raise DataError(f"{fault.filename}: vanished during the work; put it back") from None
                raise
    with contextlib.suppress(OSError):  # another job is doing the same
        shutil.rmtree(rename_aside(output / STATE), ignore_errors=True)  # renamed first: another job may be reading it
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


def finished(output: Path, plan: Plan) -> Manifest | None:
    """The manifest of the corpus in `output`, if it is complete.

    Raises DataError where it is another corpus than that of `plan`, was begun as another one, or is damaged.
    """
    found = begun(output)
    if found is not None:
        _check_same(output, plan, found)
    folders = _folders(output, plan)
    if not isinstance(found, Manifest) or not all((folder / MANIFEST).exists() for folder in folders):
        return None
    for folder in folders:
        check_finished(folder)
    return found


def begun(output: Path) -> Manifest | Plan | None:
    """The manifest of the corpus in `output`, of an unfinished one its plan; None where none was begun."""
    if (output / MANIFEST).exists():
        return load_manifest(output)
    try:
        return read_record(output / STATE / _PLAN, Plan, DataError, f"remove {output} to start again")
    except FileNotFoundError:
        return None


def _folders(output: Path, plan: Plan) -> list[Path]:
    return [output, heldout_of(output)] if plan.heldout_fraction else [output]


def _check_same(output: Path, plan: Plan, found: Plan | Manifest) -> None:
    if (plan.sampling is None) != (found.sampling is None):
        tool = "scale-cpt tokenize" if plan.sampling is None else "scale-cpt sample"
        raise DataError(f"{output}: was not made by {tool}; choose another --output, or another name for the corpus")
    terms = _terms(found)
    for name, expected in _terms(plan).items():
        if name in terms and expected != terms[name]:
            raise DataError(
                f"{output}: was begun with another {name.replace('_', ' ')}: expected {expected!r:.120}, found "
                f"{terms[name]!r:.120}; set it back, or remove this folder and {output.name}.heldout to make the "
                "corpus again, or choose another --output"
            )


def _terms(made: Plan | Manifest) -> dict[str, Any]:
    """What may not differ between two attempts, by name."""
    fields = made.model_dump(include=set(Plan.model_fields))
    tokenizer, sampling = fields.pop("tokenizer"), fields.pop("sampling") or {}
    if isinstance(made, Manifest):  # it does not say how the work was divided, and either encoder may have made it
        fields["inputs"] = [(file.path, file.bytes) for file in made.inputs]
        del tokenizer["backend"]
    return {**tokenizer, **sampling, **fields}  # the size of units, which others decide, comes last


def check_finished(folder: Path, *, sampled: int | None = SAMPLED_BYTES) -> None:
    """Compares the corpus in `folder`, or an empty held-out part, with its manifest: see TokenCorpus.check."""
    if load_manifest(folder).tokens:
        TokenCorpus(folder).check(sampled=sampled)


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
    sizes = {unit.name: unit.size for unit in units}
    found = zip(sizes, in_threads(partial(_record_of, state, schema), sizes), strict=True)
    done = {name: record for name, record in found if record is not None}
    yield from done.items()
    left = [unit for unit in units if unit.name not in done]
    k, n = share
    left = left[k::n] + [unit for at, unit in enumerate(left) if at % n != k][::-1]
    with progress_bar(what, sum(sizes.values()), measured_in, done=sum(sizes[name] for name in done)) as progress:
        for name, record in workers.run(partial(_do, state, schema, work), left):
            progress.update(sizes[name])
            yield name, record


def _do(state: Path, schema: type[_Record], work: Callable[[_Unit], _Record], unit: _Unit) -> tuple[str, _Record]:
    record = _record_of(state, schema, unit.name)  # another job may have done it
    if record is None:
        record = work(unit)
        write_record(state / f"{unit.name}.json", record)
    return unit.name, record


def _record_of(state: Path, schema: type[_Record], name: str) -> _Record | None:
    try:
        return read_record(state / f"{name}.json", schema, DataError, "remove it to do its unit again")
    except (FileNotFoundError, DataError):  # damaged: the unit is done again
        return None


def manifest_of(
    plan: Plan, part: str, shards: Mapping[str, UnitPart], inputs: list[InputFile], rejected: Mapping[str, int] = {}
) -> Manifest:
    """The manifest of a part of the corpus of `plan`; `shards` are its units, by their names."""
    counts = {name: sum(getattr(unit, name) for unit in shards.values()) for name in Counts.model_fields}
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
