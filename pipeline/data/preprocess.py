"""Input files to a token corpus: spread over workers, and restartable at any moment.

The corpus grows in its own folder: shards are published one by one, and `manifest.json`, written last, completes it.
Its bytes depend on the job alone. A job that is killed and started again, with any number of workers, gives the same
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipeline import log
from pipeline.data.bad_records import BadRecordLimit
from pipeline.data.file_content import FileContent, check_file, content_of
from pipeline.data.imported import BACKEND, import_shards
from pipeline.data.job_state import (
    StateRecord,
    UnitPart,
    UnitRecord,
    begin,
    begun_for,
    check_finished_units,
    identity,
    input_hash,
    kept,
    own_first,
    refuse_other,
    remove_state,
    sums_of,
)
from pipeline.data.records import DocumentUnit, Keys
from pipeline.data.token_corpus import (
    MANIFEST,
    SAMPLED_BLOCKS,
    InputFile,
    Manifest,
    TokenCorpus,
    TokenizerRecord,
    load_manifest,
)
from pipeline.data.token_shards import Shard, token_dtype
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.unit_work import Job, finished_record, state_of, tokenize_unit
from pipeline.data.units import TOKENS, Unit, default_unit_bytes, input_files, most_records, split_file
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import file_hash, in_threads, published_file, read_bytes, write_json, write_record
from pipeline.log import progress_bar

QUARANTINE = "quarantine.jsonl"
_logger = log.get_logger(__name__)


class Plan(BaseModel):
    """What a folder was begun for. A job with another plan must not continue there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: list[tuple[str, int]]
    fingerprint: str
    document_start: list[int]
    document_end: list[int]
    text_key: str
    prompt_key: str | None = None
    document: DocumentUnit = "line"
    chat_template: str | None = None
    encoding: str | None = None
    heldout_fraction: float
    unit_bytes: int


def preprocess(
    job: Job,
    workers: Workers,
    *,
    max_bad_fraction: float = 0.01,
    share: tuple[int, int] = (0, 1),
    reference_only: bool = False,
) -> Manifest:
    """Makes the token corpus of `job`, or continues it; a finished one is left as it is.

    Args:
        job: what to make.
        workers: the processes that do the work.
        max_bad_fraction: the largest accepted fraction of bad records.
        share: (k, n): this is the k-th of n jobs that make the same corpus at the same time. Each does its own share
            of the units first and then the unfinished rest, so any of them can finish the corpus alone.
        reference_only: never use the fast encoder.

    Raises:
        DataError: the input, the tokenizer or the records cannot be used, or the folder holds another corpus.
    """
    tokenizer = load_tokenizer(Path(job.tokenizer), end_of_document=job.end_of_document)
    plan = plan_of(job, tokenizer)
    files = [Path(path) for path, _ in plan.inputs]
    if (job.output / MANIFEST).exists():
        return _finished(job, plan)
    if any(file.suffix == TOKENS for file in files):
        return _import(job, plan, tokenizer, workers)
    try:
        begin(job.output, job.state, plan, job.heldout if job.heldout_fraction > 0 else None)
        if reference_only and not job.reference_only.exists():
            write_json(job.reference_only, {"reason": "asked for"})
        plan_id = identity(plan.model_dump())
        by_index = list(enumerate(files))
        split = dict(
            workers.run(
                partial(_split_one, job, plan_id, plan.unit_bytes), own_first(by_index, share), name=itemgetter(1)
            )
        )
        units = [unit for index in range(len(files)) for unit in split[index]]
        check_finished_units([state_of(job, plan_id, unit) for unit in units], workers, share)
        records = _tokenize(job, plan_id, units, workers, max_bad_fraction, share)
        hashes = dict(
            workers.run(partial(input_hash, job.state, plan_id), own_first(by_index, share), name=itemgetter(1))
        )
        inputs = [
            InputFile(path=path, bytes=size, sha256=hashes[index]) for index, (path, size) in enumerate(plan.inputs)
        ]
        return _publish(
            job, plan, inputs, list(zip(units, records, strict=True)), tokenizer.vocab_size, max_bad_fraction
        )
    except FileNotFoundError as error:
        # Another job that shares the work may have finished and removed the state.
        if (job.output / MANIFEST).exists():
            return _finished(job, plan)
        raise DataError(f"{error.filename}: vanished during the work; start again") from None


def _import(job: Job, plan: Plan, tokenizer: Tokenizer, workers: Workers) -> Manifest:
    """Makes the corpus of tokens that another program wrote; nothing of it is kept after a kill but finished links."""
    files = [Path(path) for path, _ in plan.inputs]
    begin(job.output, job.state, plan)
    parts = import_shards(job.output, files, Path(job.tokenizer), workers)
    inputs = [
        InputFile(path=path, bytes=size, sha256=digest)
        for (path, size), digest in zip(plan.inputs, in_threads(file_hash, files), strict=True)
    ]
    manifest = _manifest(job, plan, inputs, tokenizer.vocab_size, BACKEND, Counter(), job.part, parts)
    # As they are stored: another program may have chosen wider ids than needed.
    types = {Shard(job.output / name, check=False).dtype.name for name, _ in parts}
    if len(types) > 1:
        raise DataError(f"{', '.join(job.inputs)}: expected ids of one type, found {', '.join(sorted(types))}")
    manifest = manifest.model_copy(update={"token_dtype": types.pop()})
    manifest.save(job.output)
    remove_state(job.state)
    return manifest


def plan_of(job: Job, tokenizer: Tokenizer) -> Plan:
    """Looks for the input files of `job`, and describes what it makes with its `tokenizer`.

    Raises:
        DataError: one of them cannot be used.
    """
    files = input_files(job.inputs)
    if any(file.suffix == TOKENS for file in files) and (
        any(file.suffix != TOKENS for file in files) or job.heldout_fraction or job.messages_key or job.prompt_key
    ):
        raise DataError(
            f"{', '.join(job.inputs)}: tokens are imported as they are: name no files of text beside them, and neither "
            "heldout_fraction nor prompts; a held-out part has inputs of its own"
        )
    return Plan(
        inputs=[(str(file), size) for file, size in files.items()],
        fingerprint=tokenizer.fingerprint,
        document_start=list(tokenizer.document_start),
        document_end=list(tokenizer.document_end),
        **_reading(job.keys),
        heldout_fraction=job.heldout_fraction,
        unit_bytes=job.unit_bytes or default_unit_bytes(sum(files.values())),
    )


def _reading(keys: Keys) -> dict[str, Any]:
    """The fields of a plan and of a manifest that say where documents were in the inputs."""
    template = None if keys.chat is None else keys.chat.fingerprint
    return {
        "text_key": keys.text,
        "prompt_key": keys.prompt,
        "document": keys.document,
        "chat_template": template,
        "encoding": keys.encoding,
    }


def check_folder(job: Job, tokenizer: Tokenizer) -> None:
    """Raises DataError where `preprocess` would refuse `job`, or its folder, before any work."""
    plan = plan_of(job, tokenizer)
    if (job.output / MANIFEST).exists():
        _check_finished(job, plan)
    elif (begun := begun_for(job.state, Plan)) is not None:
        refuse_other(job.output, plan, begun)


def _finished(job: Job, plan: Plan) -> Manifest:
    """The manifest of a corpus that is already complete, if it is the one that `job` describes."""
    manifest = _check_finished(job, plan)
    remove_state(job.state)
    _logger.info("%s: already complete, %d documents, %d tokens", job.output, manifest.documents, manifest.tokens)
    return manifest


def _check_finished(job: Job, plan: Plan) -> Manifest:
    manifest = load_manifest(job.output)
    if manifest.sampling is not None:
        raise DataError(f"{job.output}: holds text that a model wrote (tools/sample_base.py); choose another --output")
    found = Plan(
        inputs=[(file.path, file.bytes) for file in manifest.inputs],
        fingerprint=manifest.tokenizer.fingerprint,
        document_start=manifest.tokenizer.document_start,
        document_end=manifest.tokenizer.document_end,
        text_key=manifest.text_key,
        prompt_key=manifest.prompt_key,
        document=manifest.document,
        chat_template=manifest.chat_template,
        encoding=manifest.encoding,
        heldout_fraction=manifest.heldout_fraction,
        unit_bytes=plan.unit_bytes,
    )
    refuse_other(job.output, plan, found)
    check_finished(job.output)
    if job.heldout_fraction > 0:
        try:
            check_finished(job.heldout)
        except DataError as error:
            raise DataError(f"{error}; it is made together with {job.output}: remove both folders") from None
    return manifest


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


class FileUnits(StateRecord):
    """The units of one input file."""

    units: list[Unit]


def _split_one(job: Job, plan: str, unit_bytes: int, task: tuple[int, Path]) -> tuple[int, list[Unit]]:
    """The units of one input file, determined once and kept in the job's state."""
    index, path = task
    cached, made_for = job.state / f"{index:05d}.ranges.json", identity(plan, index)
    record = kept(cached, FileUnits, made_for)
    if record is None:
        record = FileUnits(made_for=made_for, units=split_file(path, index, job.keys, unit_bytes))
        write_record(cached, record)
    return index, record.units


def _tokenize_one(job: Job, plan: str, most_rejected: float, unit: Unit) -> tuple[str, UnitRecord]:
    return unit.name, tokenize_unit(job, plan, unit, most_rejected)


def _tokenize(
    job: Job, plan: str, units: Sequence[Unit], workers: Workers, max_bad_fraction: float, share: tuple[int, int]
) -> list[UnitRecord]:
    """The outcomes of all units. If the fast encoder makes an error, the units it encoded before are encoded again.

    A record may vanish at any moment, when another job that shares the work sees such an error or finishes and removes
    the state. So the records returned were all read in one pass, and are all of one encoder.
    """
    limit = BadRecordLimit(max_bad_fraction)
    most_rejected = max_bad_fraction * most_records(units, job.keys) if max_bad_fraction else 0
    one = partial(_tokenize_one, job, plan, most_rejected)
    sizes = {unit.name: unit.text_bytes for unit in units}
    quarantines: list[Path] = []
    counted: set[str] = set()

    def count(name: str, record: UnitRecord) -> None:
        if name not in counted:
            counted.add(name)
            limit.add(record.records, record.rejected)
            quarantines.extend(_quarantines(job, [(name, record)]))

    documents = tokens = 0
    with progress_bar("tokenizing", sum(sizes.values()), "B") as bar:
        while True:
            outcomes = [finished_record(job, plan, unit) for unit in units]
            records = [outcome for outcome in outcomes if outcome is not None]
            for unit, outcome in zip(units, outcomes, strict=True):
                if outcome is not None:
                    count(unit.name, outcome)
            backends = {record.backend for record in records}
            if len(records) == len(units):
                if len(backends) <= 1:
                    return records
                # Its mark is lost, or was set by another job in this moment.
                write_json(job.reference_only, {"reason": "some units are of the reference"})
            unfinished = [unit for unit, outcome in zip(units, outcomes, strict=True) if outcome is None]
            # Units that were finished before do not count towards the speed.
            bar.initial = bar.n = sum(sizes.values()) - sum(unit.text_bytes for unit in unfinished)
            for name, record in workers.run(one, own_first(unfinished, share)):
                documents += record.train.documents + record.heldout.documents
                tokens += record.train.tokens + record.heldout.tokens
                seconds = max(bar.format_dict["elapsed"], 1e-9)
                speed = f"{documents / seconds:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s"
                bar.set_postfix_str(speed, refresh=False)
                bar.update(sizes[name])
                count(name, record)
                limit.check(quarantines)


def _publish(
    job: Job,
    plan: Plan,
    inputs: list[InputFile],
    outcomes: Sequence[tuple[Unit, UnitRecord]],
    vocab_size: int,
    max_bad_fraction: float,
) -> Manifest:
    """Writes the quarantine and the manifests, that of the train part last, and removes the state."""
    limit = BadRecordLimit(max_bad_fraction)
    for _, record in outcomes:
        limit.add(record.records, record.rejected)
    quarantines = list(_quarantines(job, [(unit.name, record) for unit, record in outcomes]))
    limit.check(quarantines, at_end=True)
    if not any(record.train.documents for _, record in outcomes):
        raise DataError(
            f"{', '.join(job.inputs)}: no usable document in {limit.records} records: {dict(limit.rejected)}"
        )
    rejects = None
    if quarantines:
        with published_file(job.output / QUARANTINE, job.state) as joined:
            for path in quarantines:
                joined.write(read_bytes(path, DataError, "start again"))
        rejects = content_of(job.output / QUARANTINE)
    describe = partial(_manifest, job, plan, inputs, vocab_size, outcomes[0][1].backend, limit.rejected)
    if job.heldout_fraction > 0:
        describe("heldout", [(unit.name, record.heldout) for unit, record in outcomes]).save(job.heldout)
    manifest = describe(job.part, [(unit.name, record.train) for unit, record in outcomes], rejects)
    manifest.save(job.output)
    remove_state(job.state)
    return manifest


def _manifest(
    job: Job,
    plan: Plan,
    inputs: list[InputFile],
    vocab_size: int,
    backend: str,
    rejected: Counter[str],
    part: str,
    shards: Sequence[tuple[str, UnitPart]],
    quarantine: FileContent | None = None,
) -> Manifest:
    return Manifest(
        part=part,
        tokenizer=TokenizerRecord(
            fingerprint=plan.fingerprint,
            vocab_size=vocab_size,
            document_start=plan.document_start,
            document_end=plan.document_end,
            backend=backend,
        ),
        token_dtype=token_dtype(vocab_size).name,
        **_reading(job.keys),
        heldout_fraction=job.heldout_fraction,
        **sums_of(shards),
        rejected=dict(sorted(rejected.items())),
        inputs=inputs,
        quarantine=quarantine,
    )


def _quarantines(job: Job, outcomes: Iterable[tuple[str, UnitRecord]]) -> Iterator[Path]:
    """The quarantine files of units, given by their names and outcomes, that have one."""
    return (job.state / f"{name}.quarantine.jsonl" for name, record in outcomes if record.quarantine is not None)
