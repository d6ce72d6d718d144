"""Input files to a token corpus: a job whose units are ranges of the files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from pipeline.data.bad_records import BadRecordLimit
from pipeline.data.file_content import FileContent, content_of
from pipeline.data.imported import BACKEND, import_shards
from pipeline.data.jobs import (
    QUARANTINE,
    Plan,
    Share,
    UnitPart,
    UnitRecord,
    complete,
    finished,
    input_records,
    run_units,
    sums_of,
)
from pipeline.data.records import DocumentUnit, Keys
from pipeline.data.token_corpus import Manifest, TokenizerRecord
from pipeline.data.token_shards import Shard, token_dtype
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.unit_work import Job, tokenize_unit
from pipeline.data.units import TOKENS, Unit, default_unit_bytes, input_files, most_records, split_file
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import published_file, write_json


class TokenizingPlan(Plan):
    """The files, tokenizer and settings of a tokenized corpus."""

    tool: ClassVar[str] = "tools/preprocess_data.py"

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

    def of_corpus(self, manifest: Manifest) -> TokenizingPlan | None:
        if manifest.sampling is not None:
            return None
        return TokenizingPlan(
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
            unit_bytes=self.unit_bytes,
        )


class _FileUnits(BaseModel):
    """The units of one input file, which are known once a compressed one has been read."""

    units: list[Unit]


def preprocess(
    job: Job,
    workers: Workers,
    *,
    max_bad_fraction: float = 0.01,
    share: Share = (0, 1),
    reference_only: bool = False,
) -> Manifest:
    """Makes the token corpus of `job`, or continues it; a finished one is left as it is.

    Args:
        job: what to make.
        workers: the processes that do the work.
        max_bad_fraction: the largest accepted fraction of bad records.
        share: this job's, of the jobs that make the same corpus at the same time. Any of them can finish it alone.
        reference_only: never use the fast encoder.

    Raises:
        DataError: the input, the tokenizer or the records cannot be used, or the folder holds another corpus.
    """
    tokenizer = load_tokenizer(Path(job.tokenizer), end_of_document=job.end_of_document)
    plan = plan_of(job, tokenizer)
    if any(path.endswith(TOKENS) for path, _ in plan.inputs):
        return complete(job.output, plan, partial(_import, job, plan, tokenizer, workers, share))

    def make(state: Path) -> Manifest:
        if reference_only and not job.reference_only.exists():
            write_json(job.reference_only, {"reason": "asked for"})
        units = _split(job, plan, state, workers, share)
        records = _tokenize(job, units, workers, max_bad_fraction, share)
        return _publish(job, plan, state, records, tokenizer, max_bad_fraction, workers, share)

    return complete(job.output, plan, make, job.heldout if job.heldout_fraction > 0 else None)


def plan_of(job: Job, tokenizer: Tokenizer) -> TokenizingPlan:
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
    return TokenizingPlan(
        inputs=[(str(file), size) for file, size in files.items()],
        fingerprint=tokenizer.fingerprint,
        document_start=list(tokenizer.document_start),
        document_end=list(tokenizer.document_end),
        **_reading(job.keys),
        heldout_fraction=job.heldout_fraction,
        unit_bytes=job.unit_bytes or default_unit_bytes(sum(files.values())),
    )


def check_folder(job: Job, tokenizer: Tokenizer) -> None:
    """Raises DataError where `preprocess` would refuse `job`, or its folder, before any work."""
    finished(job.output, plan_of(job, tokenizer))


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


def _import(
    job: Job, plan: TokenizingPlan, tokenizer: Tokenizer, workers: Workers, share: Share, state: Path
) -> Manifest:
    """The corpus of tokens that another program wrote."""
    parts = import_shards(job.output, [Path(path) for path, _ in plan.inputs], Path(job.tokenizer), workers)
    # As they are stored: another program may have chosen wider ids than needed.
    types = {Shard(job.output / name, check=False).dtype.name for name in parts}
    if len(types) > 1:
        raise DataError(f"{', '.join(job.inputs)}: expected ids of one type, found {', '.join(sorted(types))}")
    common = _common_fields(job, plan, tokenizer, BACKEND, {}) | {"token_dtype": types.pop()}
    return Manifest(part=job.part, **common, **sums_of(parts), inputs=input_records(state, plan.inputs, workers, share))


def _split(job: Job, plan: TokenizingPlan, state: Path, workers: Workers, share: Share) -> list[Unit]:
    files = {f"{number:05d}.ranges": (number, path, size) for number, (path, size) in enumerate(plan.inputs)}
    split = partial(_split_one, job.keys, plan.unit_bytes)
    bar = ("finding units", "B", _bytes_of_file)
    found = dict(run_units(state, _FileUnits, split, files, workers, share, bar=bar))
    return [unit for name in files for unit in found[name].units]


def _split_one(keys: Keys, unit_bytes: int, file: tuple[int, str, int]) -> _FileUnits:
    return _FileUnits(units=split_file(Path(file[1]), file[0], keys, unit_bytes))


def _bytes_of_file(file: tuple[int, str, int]) -> int:
    return file[2]


def _tokenize(
    job: Job, units: list[Unit], workers: Workers, max_bad_fraction: float, share: Share
) -> dict[str, UnitRecord]:
    """The outcome of each unit. Where the fast encoder makes an error, what it encoded before is encoded again."""
    by_name = {unit.name: unit for unit in units}
    most_rejected = max_bad_fraction * most_records(units, job.keys) if max_bad_fraction else 0
    work = partial(tokenize_unit, job, most_rejected)
    while True:
        limit = BadRecordLimit(max_bad_fraction)
        records: dict[str, UnitRecord] = {}
        quarantines: list[Path] = []
        bar = ("tokenizing", "B", _bytes_of_unit)
        for name, record in run_units(job.state, UnitRecord, work, by_name, workers, share, bar=bar):
            records[name] = record
            limit.add(record.records, record.rejected)
            quarantines += [job.quarantine_of(name)] * bool(record.rejected)
            limit.check(quarantines)
        backends = {record.backend for record in records.values()}
        if len(backends) <= 1 and not (job.reference_only.exists() and "gigatoken" in backends):
            return {unit.name: records[unit.name] for unit in units}
        if not job.reference_only.exists():  # it is lost
            write_json(job.reference_only, {"reason": "some units are of the reference"})
        for name, record in records.items():
            if record.backend == "gigatoken":
                (job.state / f"{name}.json").unlink(missing_ok=True)


def _bytes_of_unit(unit: Unit) -> int:
    return unit.text_bytes


def _publish(
    job: Job,
    plan: TokenizingPlan,
    state: Path,
    records: Mapping[str, UnitRecord],
    tokenizer: Tokenizer,
    max_bad_fraction: float,
    workers: Workers,
    share: Share,
) -> Manifest:
    """Writes the quarantine and the manifest of the held-out part; returns that of the train part."""
    limit = BadRecordLimit(max_bad_fraction)
    for record in records.values():
        limit.add(record.records, record.rejected)
    quarantines = [job.quarantine_of(name) for name, record in records.items() if record.rejected]
    limit.check(quarantines, at_end=True)
    if not any(record.train.documents for record in records.values()):
        raise DataError(
            f"{', '.join(job.inputs)}: no usable document in {limit.records} records: {dict(limit.rejected)}"
        )
    rejects: FileContent | None = None
    if quarantines:
        with published_file(job.output / QUARANTINE, state) as joined:
            for path in quarantines:
                joined.write(path.read_bytes())
        rejects = content_of(job.output / QUARANTINE)
    backend = next(iter(records.values())).backend
    common = _common_fields(job, plan, tokenizer, backend, dict(sorted(limit.rejected.items())))
    common["inputs"] = input_records(state, plan.inputs, workers, share)
    if job.heldout_fraction > 0:
        heldout: dict[str, UnitPart] = {name: record.heldout for name, record in records.items()}
        Manifest(part="heldout", **common, **sums_of(heldout)).save(job.heldout)
    train = {name: record.train for name, record in records.items()}
    return Manifest(part=job.part, **common, **sums_of(train), quarantine=rejects)


def _common_fields(
    job: Job, plan: TokenizingPlan, tokenizer: Tokenizer, backend: str, rejected: dict[str, int]
) -> dict[str, Any]:
    """What both parts of a corpus have in their manifests."""
    return {
        "tokenizer": TokenizerRecord(
            fingerprint=plan.fingerprint,
            vocab_size=tokenizer.vocab_size,
            document_start=plan.document_start,
            document_end=plan.document_end,
            backend=backend,
        ),
        "token_dtype": token_dtype(tokenizer.vocab_size).name,
        **_reading(job.keys),
        "heldout_fraction": job.heldout_fraction,
        "rejected": rejected,
    }
