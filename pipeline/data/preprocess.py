"""Input files to a token corpus: a job whose units are ranges of the files."""

from __future__ import annotations

from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path

from pydantic import BaseModel

from pipeline.data.bad_records import BadRecordLimit
from pipeline.data.file_content import content_of
from pipeline.data.jobs import (
    QUARANTINE,
    Plan,
    Share,
    UnitRecord,
    complete,
    finished,
    heldout_of,
    manifest_of,
    run_units,
)
from pipeline.data.records import Keys
from pipeline.data.token_corpus import InputFile, Manifest
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.unit_work import Job, tokenize_unit
from pipeline.data.units import Unit, default_unit_bytes, input_files, is_text, split_file
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import file_hash, published_file


class _FileRecord(BaseModel):
    """The hash of an input file and its units, which are known once a compressed one has been read."""

    sha256: str
    units: list[Unit]


def preprocess(job: Job, workers: Workers, *, max_bad_fraction: float = 0.01, share: Share = (0, 1)) -> Manifest:
    """Makes the token corpus of `job`, or continues it; a finished one is left as it is.

    Args:
        job: what to make.
        workers: the processes that do the work.
        max_bad_fraction: the largest accepted fraction of bad records.
        share: this job's, of the jobs that make the same corpus at the same time. Any of them can finish it alone.

    Raises:
        DataError: the input, the tokenizer or the records cannot be used, or the folder holds another corpus.
    """
    plan = plan_of(job, load_tokenizer(Path(job.tokenizer), end_of_document=job.end_of_document))

    def make(state: Path) -> Manifest:
        numbered = {f"{number:05d}.ranges": (number, *file) for number, file in enumerate(plan.inputs)}
        read = partial(_read_file, job.keys, plan.unit_size)
        of_file = ("finding units", "B", itemgetter(2))
        files = dict(run_units(state, _FileRecord, read, numbered, workers, share, bar=of_file))
        units = {unit.name: unit for name in numbered for unit in files[name].units}
        limit = BadRecordLimit(max_bad_fraction)
        records: dict[str, UnitRecord] = {}
        quarantines: list[Path] = []
        work, bar = partial(tokenize_unit, job), ("tokenizing", "B", attrgetter("text_bytes"))
        for name, record in run_units(state, UnitRecord, work, units, workers, share, bar=bar):
            records[name] = record
            limit.add(record)
            quarantines += [job.quarantine_of(name)] * bool(record.rejected)
            limit.check(quarantines)
        limit.check(quarantines, at_end=True)
        records = {name: records[name] for name in units}
        if not any(record.train.documents for record in records.values()):
            raise DataError(
                f"{', '.join(job.inputs)}: no usable document in {limit.records} records: {dict(limit.rejected)}"
            )
        if quarantines:
            with published_file(job.output / QUARANTINE, state) as joined:
                for path in sorted(quarantines):
                    joined.write(path.read_bytes())
        inputs = [
            InputFile(path=path, bytes=size, sha256=files[name].sha256) for name, (_, path, size) in numbered.items()
        ]
        if job.heldout_fraction > 0:
            heldout = {name: record.heldout for name, record in records.items()}
            manifest_of(plan, "heldout", heldout, inputs, rejected=limit.rejected).save(heldout_of(job.output))
        rejects = content_of(job.output / QUARANTINE) if quarantines else None
        train = {name: record.train for name, record in records.items()}
        return manifest_of(plan, job.part, train, inputs, rejected=limit.rejected, quarantine=rejects)

    return complete(job.output, plan, make)


def plan_of(job: Job, tokenizer: Tokenizer) -> Plan:
    """Looks for the input files of `job`, and describes what it makes with its `tokenizer`.

    Raises:
        DataError: one of them cannot be used.
    """
    files, keys = input_files(job.inputs), job.keys
    encoder = tokenizer.reference if job.reference_only or tokenizer.fast is None else tokenizer.fast
    return Plan(
        inputs=[(str(file), size) for file, size in files.items()],
        tokenizer=tokenizer.record(encoder.name if is_text(job.inputs) else "imported"),
        text_key=keys.text,
        prompt_key=keys.prompt,
        document=keys.document,
        chat_template=None if keys.chat is None else keys.chat.fingerprint,
        encoding=keys.encoding,
        heldout_fraction=job.heldout_fraction,
        unit_size=job.unit_bytes or default_unit_bytes(sum(files.values())),
    )


def check_folder(job: Job, tokenizer: Tokenizer) -> None:
    """Raises DataError where `preprocess` would refuse `job`, or its folder, before any work."""
    finished(job.output, plan_of(job, tokenizer))


def _read_file(keys: Keys, unit_bytes: int, file: tuple[int, str, int]) -> _FileRecord:
    number, path, _ = file
    return _FileRecord(sha256=file_hash(Path(path)), units=split_file(Path(path), number, keys, unit_bytes))
