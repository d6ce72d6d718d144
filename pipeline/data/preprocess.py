"""The job: input files to a token corpus, spread over workers, restartable at any instant.

The corpus grows in its own folder: shards are published one by one, and `manifest.json`, written last, makes it whole.
What it holds depends on the job alone. Killed and started again with other workers, it comes out the same, byte for
byte.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from pipeline import log
from pipeline.data import token_corpus as manifests
from pipeline.data.records import BadRecordLimit
from pipeline.data.token_corpus import InputFile, Manifest, ShardRecord, TokenizerRecord, load_manifest
from pipeline.data.token_shards import token_dtype
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.unit_work import Job, UnitRecord, finished_record, hash_input, tokenize_unit
from pipeline.data.units import Unit, default_unit_bytes, input_files, split_file
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import published_file, rename_aside, write_json
from pipeline.log import progress_bar

# --- How far a job is: bytes, documents and tokens a second, and when it will be done -------------------------------


class Progress(AbstractContextManager["Progress"]):
    """The bytes of text that are done, with the speed in documents and tokens."""

    def __init__(self, total_bytes: int) -> None:
        self._bar = progress_bar("tokenizing", total_bytes, "B")
        self._documents = self._tokens = 0

    def start_at(self, done_bytes: int) -> None:
        """Says how much was done before, which does not count for the speed."""
        self._bar.initial = self._bar.n = done_bytes

    def add(self, text_bytes: int, record: UnitRecord) -> None:
        """Counts a finished unit."""
        self._documents += record.train.documents + record.heldout.documents
        self._tokens += record.train.tokens + record.heldout.tokens
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        rates = f"{self._documents / elapsed:,.0f} documents/s, {self._tokens / elapsed:,.0f} tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(text_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


# --- The job: input files to a token corpus, spread over workers, ---

QUARANTINE = "quarantine.jsonl"
_logger = log.get_logger(__name__)
_T = TypeVar("_T")


class Plan(BaseModel):
    """What was begun in a folder. Another job must not go on there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: list[tuple[str, int]]
    fingerprint: str
    document_start: list[int]
    document_end: list[int]
    text_key: str
    prompt_key: str | None = None
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
    """Makes the token corpus of `job`, or goes on with it; a finished one is left as it is.

    Args:
        job: what to make.
        workers: who makes it.
        max_bad_fraction: how many of all records may be bad.
        share: (k, n): this is the k-th of n jobs that work on the same corpus at the same time. Each begins with its
            own share of the units and then helps with what is left, so that it is no matter which of them are alive.
        reference_only: leave the fast path alone from the start.

    Raises:
        DataError: the input, the tokenizer or the records cannot be used, or the folder holds another corpus.
    """
    files = input_files(job.inputs)
    unit_bytes = job.unit_bytes or default_unit_bytes(files)
    tokenizer = load_tokenizer(Path(job.tokenizer), end_of_document=job.end_of_document)
    plan = Plan(
        inputs=[(str(file), file.stat().st_size) for file in files],
        fingerprint=tokenizer.fingerprint,
        document_start=list(tokenizer.document_start),
        document_end=list(tokenizer.document_end),
        text_key=job.text_key,
        prompt_key=job.prompt_key,
        heldout_fraction=job.heldout_fraction,
        unit_bytes=unit_bytes,
    )
    if (job.output / manifests.NAME).exists():
        return _finished(job, plan)
    try:
        _begin(job, plan)
        if reference_only and not job.reference_only.exists():
            write_json(job.reference_only, {"reason": "asked for"})
        units = _split(job, files, unit_bytes, workers, share)
        records = _work(job, units, workers, max_bad_fraction, share)
        _hash(job, files, workers, share)
        return _close(job, plan, units, records, tokenizer.vocab_size, max_bad_fraction)
    except FileNotFoundError:
        # Another of the jobs that share the work may have finished and cleared the state away meanwhile.
        if (job.output / manifests.NAME).exists():
            return _finished(job, plan)
        raise


def _begin(job: Job, plan: Plan) -> None:
    try:
        job.state.mkdir(parents=True, exist_ok=True)
        if job.heldout_fraction > 0:
            job.heldout.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{error.filename}: no folder can be made there ({error.strerror}); name another --output"
        ) from None
    path = job.state / "plan.json"
    if not path.exists():
        write_json(path, plan.model_dump())
    _refuse_other(job, plan, Plan.model_validate_json(path.read_bytes()))


def _finished(job: Job, plan: Plan) -> Manifest:
    """The manifest of a corpus that is there already, if it is the one that `job` asks for."""
    found = load_manifest(job.output)
    there = Plan(
        inputs=[(file.path, file.bytes) for file in found.inputs],
        fingerprint=found.tokenizer.fingerprint,
        document_start=found.tokenizer.document_start,
        document_end=found.tokenizer.document_end,
        text_key=found.text_key,
        prompt_key=found.prompt_key,
        heldout_fraction=found.heldout_fraction,
        unit_bytes=plan.unit_bytes,
    )
    _refuse_other(job, plan, there)
    _clear(job)
    _logger.info("%s: there already, %d documents, %d tokens", job.output, found.documents, found.tokens)
    return found


def _refuse_other(job: Job, wanted: Plan, there: Plan) -> None:
    for name in Plan.model_fields:
        expected, found = getattr(wanted, name), getattr(there, name)
        if expected != found:
            raise DataError(
                f"{job.output}: was begun with another {name.replace('_', ' ')}: expected {_short(expected)}, "
                f"found {_short(found)}; remove the folder to begin anew, or choose another"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _split(job: Job, files: Sequence[Path], unit_bytes: int, workers: Workers, share: tuple[int, int]) -> list[Unit]:
    """All units of all files. Each file is split by whoever comes first, and the outcome kept."""
    tasks = _own_first(list(enumerate(files)), share)
    split = dict(workers.run(partial(_split_one, job, unit_bytes), tasks))
    return [unit for index in range(len(files)) for unit in split[index]]


def _split_one(job: Job, unit_bytes: int, task: tuple[int, Path]) -> tuple[int, list[Unit]]:
    index, path = task
    kept = job.state / f"{index:05d}.ranges.json"
    if kept.exists():
        return index, TypeAdapter(list[Unit]).validate_json(kept.read_bytes())
    units = split_file(path, index, job.keys, unit_bytes)
    write_json(kept, [asdict(unit) for unit in units])
    return index, units


def _work(
    job: Job, units: Sequence[Unit], workers: Workers, max_bad_fraction: float, share: tuple[int, int]
) -> list[UnitRecord]:
    """Does every unit, and does again those of the fast path if it is found wrong on the way; the outcome of each.

    A record may go at any instant, when another of the jobs that share the work finds the fast path wrong, or has
    finished and clears the state away; so what is returned was read whole, and is of one encoder.
    """
    limit = BadRecordLimit(max_bad_fraction)
    sizes = {unit.name: unit.text_bytes for unit in units}
    for record in filter(None, (finished_record(job, unit) for unit in units)):
        limit.add(record.records, record.rejected)
    with Progress(total_bytes=sum(sizes.values())) as progress:
        while True:
            outcomes = [finished_record(job, unit) for unit in units]
            records = [outcome for outcome in outcomes if outcome is not None]
            if len(records) == len(units) and len({record.backend for record in records}) <= 1:
                return records
            unfinished = [unit for unit, outcome in zip(units, outcomes, strict=True) if outcome is None]
            progress.start_at(sum(sizes.values()) - sum(unit.text_bytes for unit in unfinished))
            for name, record in workers.run(partial(_tokenize_one, job), _own_first(unfinished, share)):
                progress.add(sizes[name], record)
                limit.add(record.records, record.rejected)
                limit.check(_quarantines(job, units))


def _tokenize_one(job: Job, unit: Unit) -> tuple[str, UnitRecord]:
    return unit.name, tokenize_unit(job, unit)


def _hash_one(job: Job, task: tuple[int, Path]) -> str:
    return hash_input(job, task[0], str(task[1]))


def _hash(job: Job, files: Sequence[Path], workers: Workers, share: tuple[int, int]) -> None:
    for _ in workers.run(partial(_hash_one, job), _own_first(list(enumerate(files)), share)):
        pass


def _own_first(tasks: Sequence[_T], share: tuple[int, int]) -> list[_T]:
    """This job's share of the tasks, then everybody else's, from the end: there the others are least likely to be."""
    k, n = share
    others = [task for at, task in enumerate(tasks) if at % n != k]
    return [*tasks[k::n], *reversed(others)]


def _close(
    job: Job,
    plan: Plan,
    units: Sequence[Unit],
    records: Sequence[UnitRecord],
    vocab_size: int,
    max_bad_fraction: float,
) -> Manifest:
    """Writes down what came out, the train part's manifest last, and clears the state away."""
    limit = BadRecordLimit(max_bad_fraction)
    for record in records:
        limit.add(record.records, record.rejected)
    limit.check(_quarantines(job, units), at_end=True)
    if not any(record.train.documents for record in records):
        raise DataError(
            f"{', '.join(job.inputs)}: no usable document in {limit.records} records: {dict(limit.rejected)}"
        )
    _publish_quarantine(job, units)
    inputs = [
        InputFile(path=path, bytes=size, sha256=hash_input(job, index, path))
        for index, (path, size) in enumerate(plan.inputs)
    ]
    outcomes = list(zip(units, records, strict=True))
    describe = partial(_manifest, job, plan, outcomes, inputs, vocab_size, limit.rejected)
    if job.heldout_fraction > 0:
        describe("heldout").save(job.heldout)
    made = describe(job.part)
    made.save(job.output)
    _clear(job)
    return made


def _clear(job: Job) -> None:
    """Removes the state of a finished corpus: all of it at one instant, for another job may be reading it."""
    with contextlib.suppress(OSError):  # another job takes it away now, and removes it
        shutil.rmtree(rename_aside(job.state), ignore_errors=True)


def _manifest(
    job: Job,
    plan: Plan,
    outcomes: Sequence[tuple[Unit, UnitRecord]],
    inputs: list[InputFile],
    vocab_size: int,
    rejected: Counter[str],
    part: str,
) -> Manifest:
    split_off = part == "heldout" and job.heldout_fraction > 0
    counted = [(unit, record.heldout if split_off else record.train) for unit, record in outcomes]
    tokens, characters = sum(one.tokens for _, one in counted), sum(one.characters for _, one in counted)
    size = sum(one.bytes for _, one in counted)
    return Manifest(
        part=part,
        tokenizer=TokenizerRecord(
            fingerprint=plan.fingerprint,
            vocab_size=vocab_size,
            document_start=plan.document_start,
            document_end=plan.document_end,
            backend=outcomes[0][1].backend,
        ),
        token_dtype=token_dtype(vocab_size).name,
        text_key=job.text_key,
        prompt_key=job.prompt_key,
        heldout_fraction=job.heldout_fraction,
        documents=sum(one.documents for _, one in counted),
        tokens=tokens,
        characters=characters,
        bytes=size,
        prompt_tokens=sum(one.prompt_tokens for _, one in counted),
        prompt_bytes=sum(one.prompt_bytes for _, one in counted),
        tokens_per_character=round(tokens / max(characters, 1), 6),
        tokens_per_byte=round(tokens / max(size, 1), 6),
        rejected=dict(sorted(rejected.items())),
        inputs=inputs,
        shards=[
            ShardRecord(name=unit.name, documents=one.documents, tokens=one.tokens)
            for unit, one in counted
            if one.documents
        ],
    )


def _quarantines(job: Job, units: Iterable[Unit]) -> Iterator[Path]:
    """The quarantine files there are, in the order of the units."""
    return filter(Path.exists, (job.state / f"{unit.name}.quarantine.jsonl" for unit in units))


def _publish_quarantine(job: Job, units: Iterable[Unit]) -> None:
    """Joins the units' quarantine files; without a bad record there is none."""
    parts = list(_quarantines(job, units))
    if parts:
        with published_file(job.output / QUARANTINE, job.state) as joined:
            for part in parts:
                joined.write(part.read_bytes())
