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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, NonNegativeInt

from pipeline import log
from pipeline.data.file_content import FileContent, check_file
from pipeline.data.token_corpus import (
    CORPUS,
    MANIFEST,
    SAMPLED_BLOCKS,
    SAMPLER,
    TOKENIZER,
    Description,
    InputFile,
    Manifest,
    ShardRecord,
    TokenCorpus,
    load_manifest,
)
from pipeline.data.token_shards import ShardFile, token_dtype
from pipeline.data.workers import Workers
from pipeline.errors import DataError, OutputError
from pipeline.files import check_replaceable, read_record, rename_aside, write_record
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


class Plan(Description):
    """What a folder is begun for. A job with another plan must not continue there.

    `unit_size` is in bytes of text, or in tokens that a base writes.
    """

    inputs: list[tuple[str, int]]
    unit_size: int

    @property
    def tool(self) -> str:
        """What makes such corpora."""
        return TOKENIZER if self.sampling is None else SAMPLER


class UnitPart(BaseModel):
    """What one unit contributed to the train or to the held-out part.

    `files` is what the files of its shard hold, by the ends of their names; none without documents.
    """

    documents: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    characters: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    prompt_tokens: NonNegativeInt = 0
    prompt_bytes: NonNegativeInt = 0
    files: dict[ShardFile, FileContent] = {}


class UnitRecord(BaseModel):
    """The outcome of a unit that writes tokens."""

    train: UnitPart
    heldout: UnitPart = UnitPart()
    rejected: dict[str, NonNegativeInt] = {}


def complete(output: Path, plan: Plan, make: Callable[[Path], Manifest]) -> Manifest:
    """Makes the corpus of `plan`, or continues it; a finished one is left as it is.

    Args:
        output: its folder.
        plan: what it is.
        make: fills the folder, with the folder of unfinished work as argument.

    Raises:
        OutputError: one of the folders holds something else.
        DataError: the folder holds or was begun for another corpus.
    """
    state = output / STATE
    if (manifest := finished(output, plan)) is not None:
        _logger.info("%s: already complete, %d documents, %d tokens", output, manifest.documents, manifest.tokens)
    else:
        try:
            folders = [output, heldout_of(output)] if plan.heldout_fraction else [output]
            try:
                for folder in folders:
                    check_replaceable(folder, CORPUS)
            except OutputError:
                if not state.is_dir():  # begun, perhaps by another job at this moment
                    raise
            for folder in (*folders, state):
                Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)  # through a link
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
        if (begun := read_plan(output)) is not None:
            _check_same(output, plan, begun)
        return None
    manifest = load_manifest(output, made_by=plan.tool)
    _check_same(output, plan, manifest)
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


def read_plan(output: Path) -> Plan | None:
    """The plan that the unfinished corpus in `output` was begun for; None where none was.

    Raises:
        DataError: it is damaged, or of an earlier version.
    """
    if not (output / STATE).is_dir():
        return None
    try:
        return read_record(output / STATE / _PLAN, Plan, DataError, f"remove {output} to start again")
    except FileNotFoundError:
        return None


def _check_same(output: Path, plan: Plan, found: Plan | Manifest) -> None:
    if (plan.sampling is None) != (found.sampling is None):
        raise DataError(
            f"{output}: was not made by {plan.tool}; choose another --output, or another name for the corpus"
        )
    terms = _terms(found)
    for name, expected in _terms(plan).items():
        # A manifest does not say how the work was divided. Either encoder may have made a finished corpus.
        if name not in terms or (name == "backend" and isinstance(found, Manifest)) or expected == terms[name]:
            continue
        shown = [text if len(text) <= 120 else text[:117] + "..." for text in (repr(expected), repr(terms[name]))]
        raise DataError(
            f"{output}: was begun with another {name.replace('_', ' ')}: expected {shown[0]}, found {shown[1]}; set it "
            f"back, or remove this folder and {output.name}.heldout to make the corpus again, or choose another "
            "--output"
        )


def _terms(made: Plan | Manifest) -> dict[str, Any]:
    """What may not differ between two attempts, by name."""
    fields = made.model_dump(include=set(Plan.model_fields))
    if isinstance(made, Manifest):
        fields["inputs"] = [(file.path, file.bytes) for file in made.inputs]
    tokenizer, sampling = fields.pop("tokenizer"), fields.pop("sampling") or {}
    return {**tokenizer, **sampling, **fields}  # the size of units, which others decide, comes last


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


def heldout_of(output: Path) -> Path:
    """The folder of the held-out part of the corpus in `output`."""
    return output.with_name(output.name + ".heldout")


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
        share: this job's. Its own units come first, then the others' from the end, which those jobs reach last.
        bar: for the progress bar: what is done, and the unit and function of a unit's size.
    """
    what, of_size, size = bar
    done = {name: record for name in units if (record := _record_of(state, schema, name)) is not None}
    yield from done.items()
    left = [task for task in units.items() if task[0] not in done]
    k, n = share
    left = left[k::n] + [task for at, task in enumerate(left) if at % n != k][::-1]
    total = sum(map(size, units.values()))
    with progress_bar(what, total, of_size, done=sum(size(units[name]) for name in done)) as progress:
        for name, record in workers.run(partial(_do, state, schema, work), left, name=itemgetter(1)):
            progress.update(size(units[name]))
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


def manifest_of(
    plan: Plan,
    part: str,
    shards: Mapping[str, UnitPart],
    inputs: list[InputFile],
    *,
    rejected: Mapping[str, int] | None = None,
    quarantine: FileContent | None = None,
) -> Manifest:
    """The manifest of a part of the corpus of `plan`; `shards` are its units, by their names."""
    counted = set(UnitPart.model_fields) - {"files"}
    total = UnitPart(**{name: sum(getattr(part, name) for part in shards.values()) for name in counted})
    return Manifest(
        part=part,
        **plan.model_dump(exclude={"inputs", "unit_size"}),
        token_dtype=token_dtype(plan.tokenizer.vocab_size).name,
        **total.model_dump(exclude={"files"}),
        tokens_per_character=round(total.tokens / max(total.characters, 1), 6),
        tokens_per_byte=round(total.tokens / max(total.bytes, 1), 6),
        rejected=dict(sorted((rejected or {}).items())),
        inputs=inputs,
        shards=[
            ShardRecord(name=name, documents=part.documents, tokens=part.tokens, files=part.files)
            for name, part in shards.items()
            if part.documents
        ],
        quarantine=quarantine,
    )
