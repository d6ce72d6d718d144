"""A base model to a token corpus of its own text: spread over workers, and restartable at any moment.

As in tokenization, the corpus is made in units of work, and `manifest.json`, written last, completes it. Its bytes
depend on the job and on the kind of device, not on the workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from pipeline import log
from pipeline.config.data import Sampling
from pipeline.config.run import RunConfig
from pipeline.data.blend import mix
from pipeline.data.corpora import SAMPLER, train_folder
from pipeline.data.job_state import (
    PartCounts,
    UnitPart,
    UnitRecord,
    UnitState,
    begin,
    begun_for,
    check_finished_units,
    identity,
    input_hash,
    own_first,
    refuse_other,
    remove_state,
    sums_of,
)
from pipeline.data.preprocess import check_finished
from pipeline.data.token_corpus import (
    MANIFEST,
    InputFile,
    Manifest,
    SamplingRecord,
    TokenizerRecord,
    load_manifest,
)
from pipeline.data.token_shards import token_dtype, writing_shard
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.units import input_files
from pipeline.data.workers import Workers, worker_number
from pipeline.errors import ConfigError, DataError
from pipeline.files import write_record
from pipeline.inputs import check_sampling, check_vocabulary
from pipeline.log import progress_bar
from pipeline.model.from_hf import open_base
from pipeline.model.spec import DecoderSpec
from pipeline.rehearsal.generation import BaseWriter
from pipeline.rehearsal.openings import chosen_openings, write_openings

Device = Literal["auto", "cpu", "cuda"]
# A unit is the work that a kill can cost, and has at least one batch.
_UNITS_PER_CORPUS = 64
_MAX_UNIT_TOKENS = 2**20
# Of a small corpus, so that several workers have work.
_LEAST_UNITS = 8
# Of keys and values in fp32. More documents at a time are faster up to about the second number.
_CACHE_BYTES = 16 * 2**30
_MAX_BATCH_SIZE = 128
_BACKEND = "transformers"
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class SamplingJob:
    """Everything that decides what the base in `base` writes into `output`.

    `max_tokens` is the resolved one. `batch_size` None takes the one that the corpus was begun with, else one that
    suits the base.
    """

    base: Path
    output: Path
    sampling: Sampling
    max_tokens: int
    text_key: str = "text"
    batch_size: int | None = None

    @property
    def state(self) -> Path:
        """The folder of unfinished work; removed when the manifest is written."""
        return self.output / ".units"

    @property
    def openings(self) -> Path:
        """The shard of the openings' ids, in the state."""
        return self.state / "openings"


class SamplingPlan(SamplingRecord):
    """What a folder was begun for. A job with another plan must not continue there."""

    openings: list[tuple[str, int]]
    text_key: str
    fingerprint: str
    document_start: list[int]
    document_end: list[int]
    unit_tokens: int

    @property
    def units(self) -> list[int]:
        """The number of tokens that each unit has to write, at least."""
        count = math.ceil(self.tokens / self.unit_tokens)
        return [math.ceil(self.tokens / count)] * count


def sampling_jobs(config: RunConfig, batch_size: int | None = None) -> Iterator[SamplingJob]:
    """The jobs that make all corpora of role rehearsal of a run."""
    for name, corpus in config.data.corpora.items():
        if corpus.sample is not None:
            yield SamplingJob(
                base=config.base,
                output=train_folder(config.data, name),
                sampling=corpus.sample,
                max_tokens=corpus.sample.max_tokens or config.data.sequence_length,
                text_key=corpus.text_key,
                batch_size=batch_size,
            )


def plan_of(job: SamplingJob) -> SamplingPlan:
    """Opens everything that `job` reads, and describes it.

    Raises:
        UserError: the base, its tokenizer or the openings cannot be used, or do not fit the settings.
    """
    base = open_base(job.base)
    tokenizer = load_tokenizer(job.base)
    check_vocabulary(tokenizer, base.spec)
    check_sampling(job.sampling, job.max_tokens, tokenizer, base.spec)
    begun = begun_for(job.state, SamplingPlan)
    default = begun.batch_size if begun is not None else _batch_size(job, base.spec)
    batch_size = job.batch_size or default
    least = batch_size * job.max_tokens
    return SamplingPlan(
        base=base.hashes(),
        **job.sampling.model_dump(exclude={"max_tokens", "openings"}),
        max_tokens=job.max_tokens,
        batch_size=batch_size,
        openings=[(str(file), size) for file, size in input_files(job.sampling.openings).items()],
        text_key=job.text_key,
        fingerprint=tokenizer.fingerprint,
        document_start=list(tokenizer.document_start),
        document_end=list(tokenizer.document_end),
        unit_tokens=max(least, min(_MAX_UNIT_TOKENS, job.sampling.tokens // _UNITS_PER_CORPUS)),
    )


def finished(job: SamplingJob, plan: SamplingPlan) -> Manifest | None:
    """The manifest of a corpus that is already complete; None where it is not. Removes what is left of its making.

    Raises:
        DataError: the folder holds another corpus than `job` describes.
    """
    manifest = check_folder(job, plan)
    if manifest is not None:
        remove_state(job.state)
        _logger.info("%s: already complete, %d documents, %d tokens", job.output, manifest.documents, manifest.tokens)
    return manifest


def check_folder(job: SamplingJob, plan: SamplingPlan) -> Manifest | None:
    """The manifest of a corpus that is already complete; None where it is not.

    Raises:
        DataError: the folder holds another corpus than `job` describes.
    """
    if not (job.output / MANIFEST).exists():
        if (begun := begun_for(job.state, SamplingPlan)) is not None:
            refuse_other(job.output, plan, begun)
        return None
    manifest = load_manifest(job.output, made_by=SAMPLER)
    if manifest.sampling is None:
        raise DataError(
            f"{job.output}: holds a tokenized corpus, none that a base wrote; choose another --output, or another name "
            "for the corpus"
        )
    found = SamplingPlan(
        **manifest.sampling.model_dump(),
        openings=[(file.path, file.bytes) for file in manifest.inputs],
        text_key=manifest.text_key,
        fingerprint=manifest.tokenizer.fingerprint,
        document_start=manifest.tokenizer.document_start,
        document_end=manifest.tokenizer.document_end,
        unit_tokens=plan.unit_tokens,
    )
    wanted = plan if job.batch_size else plan.model_copy(update={"batch_size": found.batch_size})
    refuse_other(job.output, wanted, found)
    check_finished(job.output)
    return manifest


def sample_corpus(
    job: SamplingJob,
    plan: SamplingPlan,
    workers: Workers,
    *,
    device: Device = "auto",
    share: tuple[int, int] = (0, 1),
) -> Manifest:
    """Makes the corpus of `job`, or continues it; a finished one is left as it is.

    Args:
        job: what to make.
        plan: `plan_of(job)`.
        workers: the processes that do the work; each loads the base. On GPUs they take one each, in turn.
        device: where the base runs; auto is the GPUs if there are any.
        share: (k, n): this is the k-th of n jobs that make the same corpus at the same time.

    Raises:
        UserError: the openings cannot be used, the folder holds another corpus, or a batch does not fit into memory.
    """
    if (manifest := finished(job, plan)) is not None:
        return manifest
    try:
        begin(job.output, job.state, plan)
        plan_id = identity(plan.model_dump())
        if plan.openings:
            _make_openings(job, plan, plan_id)
        files = list(enumerate(Path(path) for path, _ in plan.openings))
        hashes = dict(workers.run(partial(input_hash, job.state, plan_id), own_first(files, share)))
        inputs = [
            InputFile(path=path, bytes=size, sha256=hashes[index]) for index, (path, size) in enumerate(plan.openings)
        ]
        units = [
            UnitState(_name(unit), identity(plan_id, unit), job.state, job.output) for unit in range(len(plan.units))
        ]
        check_finished_units(units, workers, share)
        records = _write_units(job, plan, units, workers, device_kind(device), share)
        return _publish(job, plan, inputs, records)
    except (FileNotFoundError, DataError) as error:
        # Another job that shares the work may have finished and removed the state.
        if (job.output / MANIFEST).exists() and (manifest := finished(job, plan)) is not None:
            return manifest
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{error.filename}: vanished during the work; start again") from None
        raise


def device_kind(device: Device) -> Literal["cpu", "cuda"]:
    """Where the base runs.

    Raises:
        ConfigError: on a GPU, and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu, or a node that has one")
    return "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda"


def _make_openings(job: SamplingJob, plan: SamplingPlan, plan_id: str) -> None:
    """Writes the shard of the openings, unless it is there as it was written."""
    own = UnitState("openings", identity(plan_id, "openings"), job.state, job.state)
    own.forget_if_damaged()
    if own.outcome() is None:
        longest = plan.max_tokens - len(plan.document_end) - 1
        tokenizer = load_tokenizer(job.base)
        shard = write_openings(
            job.openings, job.sampling, job.text_key, base=job.base, tokenizer=tokenizer, longest=longest
        )
        counts = UnitPart(documents=shard.documents, tokens=shard.tokens, files=shard.files)
        write_record(own.record_file, UnitRecord(made_for=own.made_for, backend=_BACKEND, train=counts))


def _write_units(
    job: SamplingJob,
    plan: SamplingPlan,
    units: Sequence[UnitState],
    workers: Workers,
    kind: Literal["cpu", "cuda"],
    share: tuple[int, int],
) -> list[UnitPart]:
    """What each unit wrote; units that are done are not written again."""
    parts = {unit: record.train for unit, own in enumerate(units) if (record := own.outcome()) is not None}
    # A unit writes some more than its tokens.
    with progress_bar("sampling", sum(plan.units), " tokens", done=sum(plan.units[unit] for unit in parts)) as bar:
        unfinished = [task for task in enumerate(units) if task[0] not in parts]
        for unit, part in workers.run(partial(_write_unit, job, plan, kind), own_first(unfinished, share)):
            parts[unit] = part
            bar.update(plan.units[unit])
    return [parts[unit] for unit in range(len(units))]


def _write_unit(
    job: SamplingJob, plan: SamplingPlan, kind: Literal["cpu", "cuda"], task: tuple[int, UnitState]
) -> tuple[int, UnitPart]:
    """Writes one unit and publishes its shard, unless that has been done."""
    unit, own = task
    if (done := own.outcome()) is not None:
        return unit, done.train
    device = f"cuda:{worker_number() % torch.cuda.device_count()}" if kind == "cuda" else "cpu"
    writer, tokenizer = _loaded(job.base, tuple(plan.base.items()), device)
    counts = PartCounts()
    with writing_shard(own.train / own.name, token_dtype(tokenizer.vocab_size), job.state) as shard:
        for documents in _batches(job, plan, writer, unit):
            ids, lengths = np.concatenate(documents), np.array([len(document) for document in documents])
            shard.add(ids, lengths)
            texts = [tokenizer.decode(_body(document, plan)) for document in documents]
            counts.documents += len(documents)
            counts.tokens += len(ids)
            counts.characters += sum(map(len, texts))
            counts.bytes += sum(len(text.encode()) for text in texts)
    part = UnitPart(**counts.model_dump(), files=shard.files)
    write_record(own.record_file, UnitRecord(made_for=own.made_for, backend=_BACKEND, train=part))
    return unit, part


def _batches(
    job: SamplingJob, plan: SamplingPlan, writer: BaseWriter, unit: int
) -> Iterator[Sequence[npt.NDArray[np.int64]]]:
    """Batches of documents until the unit has its tokens; the last one has as many as are still needed."""
    openings: Iterator[npt.NDArray[Any]] = repeat(np.array(plan.document_start or plan.document_end[-1:]))
    if plan.openings:
        openings = chosen_openings(job.openings, plan.seed, unit, len(plan.units))
    tokens = documents = 0
    while (left := plan.units[unit] - tokens) > 0:
        # At first no more documents than are needed if all are as long as they may be. Later an eighth more than the
        # mean length suggests: another batch for a few missing tokens would take as long as a whole one.
        needed = 1.125 * left * documents / tokens if documents else left / plan.max_tokens
        count = min(plan.batch_size, math.ceil(needed))
        try:
            batch = writer.write(
                list(islice(openings, count)),
                temperature=plan.temperature,
                max_tokens=plan.max_tokens,
                seed=mix(plan.seed, unit, documents),
            )
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"{writer.device}: {count} documents of up to {plan.max_tokens} tokens at a time do not fit into its "
                f"memory; give a smaller --batch-size than {plan.batch_size}, and remove {job.output} first"
            ) from None
        if not plan.document_start:  # the end of another document, which the base began with, is no part of this one
            batch = [document[int(document[0] == plan.document_end[-1]) :] for document in batch]
        yield batch
        tokens += sum(map(len, batch))
        documents += len(batch)


def _publish(job: SamplingJob, plan: SamplingPlan, inputs: list[InputFile], records: Sequence[UnitPart]) -> Manifest:
    """Writes the manifest, and removes the state."""
    vocab_size = load_tokenizer(job.base).vocab_size
    manifest = Manifest(
        part="train",
        tokenizer=TokenizerRecord(
            fingerprint=plan.fingerprint,
            vocab_size=vocab_size,
            document_start=plan.document_start,
            document_end=plan.document_end,
            backend=_BACKEND,
        ),
        token_dtype=token_dtype(vocab_size).name,
        text_key=plan.text_key,
        heldout_fraction=0.0,
        **sums_of([(_name(unit), record) for unit, record in enumerate(records)]),
        rejected={},
        inputs=inputs,
        sampling=SamplingRecord(**plan.model_dump(include=set(SamplingRecord.model_fields))),
    )
    manifest.save(job.output)
    remove_state(job.state)
    return manifest


@lru_cache(maxsize=1)
def _loaded(base: Path, hashes: tuple[tuple[str, str], ...], device: str) -> tuple[BaseWriter, Tokenizer]:
    """The base and its tokenizer; `hashes` make a changed base another one."""
    tokenizer = load_tokenizer(base)
    return BaseWriter(base, tokenizer, device), tokenizer


def _body(document: npt.NDArray[np.int64], plan: SamplingPlan) -> npt.NDArray[np.int64]:
    """A document without what precedes and ends it, as text is counted in every corpus."""
    start = len(plan.document_start)
    begins = start if document[:start].tolist() == plan.document_start else 0  # a chat template may begin otherwise
    return document[begins : len(document) - len(plan.document_end)]


def _batch_size(job: SamplingJob, spec: DecoderSpec) -> int:
    bytes_per_token = 2 * 4 * spec.num_layers * spec.widths.num_key_value_heads * spec.head_dim
    in_memory = _CACHE_BYTES // (bytes_per_token * job.max_tokens)
    for_units = math.ceil(job.sampling.tokens / (_LEAST_UNITS * job.max_tokens))
    return max(1, min(_MAX_BATCH_SIZE, in_memory, for_units))


def _name(unit: int) -> str:
    return f"00000-{unit:06d}"
