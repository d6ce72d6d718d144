"""A corpus folder that a job begins, continues and completes.

`<folder>/.units` holds plan.json, what the folder was begun for, and the records of finished units.
manifest.json completes the corpus, and the folder `.units` is removed. What is done in a unit:
`tokenize.job` tokenizes files, `self_generated.corpus` samples text from the base.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.data.corpus.indexed_dataset import check_file, shard_file, token_dtype
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
from pipeline.data.tokenize.unit_records import (
    PLAN_FILE,
    STATE,
    UNIT_IS_DONE_AGAIN,
    UnitPart,
    heldout_of,
)
from pipeline.errors import DataError, OutputError
from pipeline.files.folders import check_replaceable, rename_aside
from pipeline.files.json_files import read_record, write_record
from pipeline.files.publishing import own_temporary, publish_first
from pipeline.files.threads import in_threads

_logger = log.get_logger(__name__)


class CorpusPlan(Description):
    """What a folder is begun for. A job with another plan must not continue there.

    `unit_size` is in bytes of text, or in tokens that a base writes. `version` counts the ways in
    which units have been cut.
    """

    inputs: list[tuple[str, int]]
    unit_size: int
    version: int = 1


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
    own = own_temporary(output / STATE / PLAN_FILE)
    write_record(own, plan)
    # Of two jobs that begin at once, the plan of the first stays.
    publish_first(own, output / STATE / PLAN_FILE)


@contextlib.contextmanager
def _at_work(output: Path) -> Iterator[None]:
    """Holds a lock on the plan that any number of jobs share, so that none removes the state of
    another."""
    with (output / STATE / PLAN_FILE).open("rb") as plan:
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
        with (state / PLAN_FILE).open("rb") as lock:
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
    path = output / STATE / PLAN_FILE
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
            f"{output}: was begun with {_other(name, terms[name], expected)}; set it back, or "
            f"remove {folders} to make the corpus again, or choose another --output"
        )


def _other(name: str, before: Any, now: Any) -> str:
    """What is now another than before, with both values."""
    if name == "inputs" and len(before) == len(now):
        pairs = [(old, new) for old, new in zip(before, now, strict=True) if old != new]
        old, new = pairs[0]
        more = f" and {len(pairs) - 1} other files" if len(pairs) > 1 else ""
        return f"other files: expected {new[0]} of {new[1]} bytes, found {old[0]} of {old[1]}{more}"
    what = name.replace("_", " ")
    return f"another {what}: expected {now!r:.120}, found {before!r:.120}"


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
    advice = f"start again: {UNIT_IS_DONE_AGAIN}"

    def check(shard: ShardRecord) -> None:
        for end, content in shard.files.items():
            # Sizes alone: their hashes were made as they were written, and compared if the job was
            # continued.
            check_file(shard_file(folder / shard.name, end), content, advice, whole=False)

    for _ in in_threads(check, manifest.shards):
        pass
    manifest.save(folder)


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
