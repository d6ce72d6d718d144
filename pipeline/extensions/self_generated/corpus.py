"""A base model to a token corpus of its own text: a job whose units are numbers of tokens to write.

Its bytes depend on the job and on the kind of device, not on the workers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.config.data import CHAT_DATE, ChatStart, Sampling
from pipeline.config.run import RunConfig
from pipeline.data.corpus.indexed_dataset import (
    FileContent,
    ShardFile,
    ShardWriter,
    shard_file,
    token_dtype,
    writing_shard,
)
from pipeline.data.corpus.manifest import InputFile, Manifest, SamplingRecord
from pipeline.data.dataset.blend import mix
from pipeline.data.sources.object_stores import RemoteFile, input_path
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.corpora import train_folder
from pipeline.data.tokenize.corpus_folder import CorpusPlan, begun, complete, manifest_of
from pipeline.data.tokenize.input_files import input_files
from pipeline.data.tokenize.queue import JobShare, run_units
from pipeline.data.tokenize.unit_records import STATE, UnitOutcome, UnitPart, UnitRecord, WorkUnit
from pipeline.data.tokenize.workers import Workers, worker_number
from pipeline.data.tokenizer.chats import ChatTemplate, chat_template
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import ConfigError
from pipeline.extensions.self_generated.prompts import chosen_prompts, write_prompts
from pipeline.files.hashes import file_hash
from pipeline.methods.vocabulary import check_vocabulary
from pipeline.model.bases import open_base
from pipeline.model.spec import DecoderSpec

if TYPE_CHECKING:
    from pipeline.extensions.self_generated.generation import BaseWriter

# A unit is the work that a kill can cost. It has at least one batch.
_UNITS_PER_CORPUS = 64
_MAX_UNIT_TOKENS = 2**20
# Of a small corpus. A CPU's step reads all weights for each token of a batch: 10 documents of a
# base of 135 million parameters got 21 tokens/s, 64 got 78. More workers share that same memory.
_LEAST_UNITS = 2
# The memory for keys and values in fp32. More documents at a time are faster up to about the second
# number.
_CACHE_BYTES = 16 * 2**30
_MAX_BATCH_SIZE = 128


@dataclass(frozen=True)
class _Unit(WorkUnit):
    """The `number`-th of `units` units, which has to write at least `size` tokens."""

    number: int
    units: int


class Prompts(UnitOutcome):
    """What is recorded of the shard of the prompts' ids."""

    files: dict[ShardFile, FileContent]

    def written(self, state: Path, name: str) -> Iterator[tuple[Path, FileContent]]:
        for end, content in self.files.items():
            yield shard_file(state / name, end), content


@dataclass(frozen=True)
class SamplingJob:
    """Everything that decides what the base in `base` writes into `output`.

    `max_tokens` is the resolved one; `batch_size` None takes one that suits the base. `chat_date`
    is what a chat template is told is today, `chat_start` what a chat begins with.
    """

    base: Path
    output: Path
    sampling: Sampling
    max_tokens: int
    text_key: str = "text"
    batch_size: int | None = None
    messages_key: str | None = None
    chat_date: date = CHAT_DATE
    chat_start: ChatStart = "template"

    @property
    def prompts(self) -> Path:
        """The shard of the prompts' ids, in the folder of unfinished work."""
        return self.output / STATE / "prompts"

    @property
    def template(self) -> ChatTemplate | None:
        """What frames prompts that are chats."""
        sampling = self.sampling
        if not (self.messages_key or sampling.chat_template):
            return None
        systems = tuple(sampling.system_prompts)
        return chat_template(
            self.base,
            sampling.thinking,
            systems,
            sampling.seed,
            self.chat_date,
            start=self.chat_start,
        )


def sampling_jobs(config: RunConfig, batch_size: int | None = None) -> Iterator[SamplingJob]:
    """The jobs that make all corpora of role self_generated of a run."""
    for name, corpus in config.data.corpora.items():
        if corpus.sample is not None:
            yield SamplingJob(
                base=config.base,
                output=train_folder(config.data, name),
                sampling=corpus.sample,
                max_tokens=corpus.sample.max_tokens or config.data.sequence_length,
                text_key=corpus.text_key,
                batch_size=batch_size,
                messages_key=corpus.messages_key,
                chat_date=config.data.chat_date,
                chat_start=config.data.chat_start,
            )


def check_sampling(
    sampling: Sampling, max_tokens: int, tokenizer: Tokenizer, spec: DecoderSpec
) -> None:
    """Checks `max_tokens`, the longest document.

    Raises:
        ConfigError: it is too few for the prompts, or too many for the base.
    """
    frame = len(tokenizer.before_document) + len(tokenizer.document_end)
    least = frame + (sampling.prompt_tokens or 0) + 1
    most = spec.longest_document
    if not least <= max_tokens <= most:
        raise ConfigError(
            f"max_tokens: expected {least} (the prompts and a token more) to {most} (the base's "
            f"context), found {max_tokens}"
        )


def plan_of(job: SamplingJob) -> CorpusPlan:
    """Opens everything that `job` reads, and describes it.

    Raises:
        UserError: the base, its tokenizer or the prompts cannot be used, or do not fit the
            settings.
        ConfigError: settings of chats, where the prompts are no chats.
    """
    base = open_base(job.base)
    tokenizer = load_tokenizer(job.base)
    check_vocabulary(tokenizer, base.spec)
    check_sampling(job.sampling, job.max_tokens, tokenizer, base.spec)
    template = job.template
    if template is None and (job.sampling.thinking is not None or job.sampling.system_prompts):
        raise ConfigError(
            "thinking and system_prompts are of prompts that are chats: give messages_key or "
            "chat_template"
        )
    batch_size = job.batch_size or _begun_batch_size(job) or _batch_size(job, base.spec)
    sampling = SamplingRecord(
        base=base.hashes,
        **job.sampling.model_dump(exclude={"max_tokens", "prompts"}),
        max_tokens=job.max_tokens,
        batch_size=batch_size,
    )
    # At least a batch of the longest documents.
    tokens_per_batch = batch_size * job.max_tokens
    tokens_per_unit = min(_MAX_UNIT_TOKENS, sampling.tokens // _UNITS_PER_CORPUS)
    plan = CorpusPlan(
        inputs=[(str(file), size) for file, size in input_files(job.sampling.prompts).items()],
        tokenizer=tokenizer.record("transformers"),
        text_key=job.messages_key or job.text_key,
        unit_size=max(tokens_per_batch, tokens_per_unit),
        sampling=sampling,
    )
    if template is not None:
        plan.chat_date = template.date
        if job.messages_key:
            plan.chat_template = template.fingerprint
    return plan


def _begun_batch_size(job: SamplingJob) -> int | None:
    """The batch size of the corpus in the job's folder; None if none was begun.

    A pipeline continues with it.
    """
    found = begun(job.output)
    if found is None or found.sampling is None:
        return None
    return found.sampling.batch_size


def sample_corpus(
    job: SamplingJob, plan: CorpusPlan, workers: Workers, share: JobShare = (0, 1)
) -> Manifest:
    """Makes the corpus of `job` by its `plan_of`, or continues it; a finished one is left as it is.

    Each worker loads the base; on GPUs they take one each, in turn. `share`: of jobs that make one
    corpus together.

    Raises:
        UserError: the prompts cannot be used, or the folder holds another corpus.
    """

    def make(state: Path) -> Manifest:
        if plan.inputs:
            unit = WorkUnit(job.prompts.name, 1, str(job.prompts))
            choose = partial(_choose_prompts, job, plan)
            alone = Workers(None)
            for _ in run_units(state, Prompts, choose, [unit], alone, what="choosing prompts"):
                pass
        write = partial(_write_unit, job, plan)
        records: dict[str, UnitPart] = {}
        found = run_units(
            state,
            UnitRecord,
            write,
            _units_of(job, plan),
            workers,
            share,
            what="sampling",
            measured_in=" tokens",
        )
        # In the order of names, whichever worker was first: the manifest depends on the job alone.
        for name, record in sorted(found):
            records[name] = record.train
        inputs: list[InputFile] = []
        for path, size in plan.inputs:
            inputs.append(InputFile(path=path, bytes=size, sha256=_identity(path)))
        return manifest_of(plan, "train", records, inputs)

    return complete(job.output, plan, make)


def _identity(path: str) -> str:
    """What stands for the content of a file of prompts: its hash, or what its store says of it."""
    file = input_path(path)
    if isinstance(file, RemoteFile):
        return file.identity()
    return file_hash(file)


def _units_of(job: SamplingJob, plan: CorpusPlan) -> list[_Unit]:
    """The units of a corpus: as many as its tokens need, all of the same size."""
    count = math.ceil(job.sampling.tokens / plan.unit_size)
    tokens = math.ceil(job.sampling.tokens / count)
    units: list[_Unit] = []
    for number in range(count):
        name = f"00000-{number:06d}"
        units.append(_Unit(name, tokens, str(job.output / name), number, count))
    return units


def default_workers(base: Path) -> int:
    """A worker for each GPU.

    Without a GPU, a worker for each core, or as often as the free memory holds the base.
    """
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    weights = sum(file.stat().st_size for file in open_base(base).files)
    needed = 2 * weights  # as much again for keys and values
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), free // needed))


def _choose_prompts(job: SamplingJob, plan: CorpusPlan, _: WorkUnit) -> Prompts:
    longest = job.max_tokens - len(plan.tokenizer.document_end) - 1
    template = job.template
    keys = Keys(job.text_key)
    if job.messages_key:
        keys = Keys(job.messages_key, job.messages_key, chat=template)
    files = write_prompts(job.prompts, job.sampling, keys, template, base=job.base, longest=longest)
    return Prompts(files=files)


def _write_unit(job: SamplingJob, plan: CorpusPlan, unit: _Unit) -> UnitRecord:
    """Writes documents until they have the unit's tokens."""
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{worker_number() % torch.cuda.device_count()}"
    sampling = plan.sampling
    assert sampling is not None, "plan_of sets it"
    writer, tokenizer = _loaded(job.base, tuple(sampling.base.items()), device)
    prompts: Iterator[npt.NDArray[Any]] = repeat(np.array(tokenizer.before_document))
    if plan.inputs:
        prompts = chosen_prompts(job.prompts, sampling.seed, unit.number, unit.units)
    part = UnitPart()
    dtype = token_dtype(tokenizer.vocab_size)
    with writing_shard(job.output / unit.name, dtype, job.output / STATE) as shard:
        while shard.tokens < unit.size:
            count = _documents_needed(unit.size - shard.tokens, shard, sampling.max_tokens)
            try:
                documents = writer.write(
                    list(islice(prompts, count)),
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    batch_size=sampling.batch_size,
                    # A seed for each call: a killed unit starts again with the same documents.
                    seed=mix(sampling.seed, unit.number, shard.documents),
                )
            except torch.OutOfMemoryError:
                raise ConfigError(
                    f"{device}: {sampling.batch_size} documents of up to {sampling.max_tokens} "
                    f"tokens at a time do not fit into its memory; remove {job.output}, and give a "
                    "smaller --batch-size"
                ) from None
            if not tokenizer.document_start:
                documents = [_without_end_before(document, tokenizer) for document in documents]
            lengths = np.array([len(document) for document in documents])
            shard.add(np.concatenate(documents), lengths)
            for document in documents:
                text = _text_of(document, tokenizer)
                part.characters += len(text)
                part.bytes += len(text.encode())
    part.documents = shard.documents
    part.tokens = shard.tokens
    part.files = shard.files
    return UnitRecord(train=part)


def _documents_needed(tokens: int, written: ShardWriter, max_tokens: int) -> int:
    """How many more documents to write for `tokens` more tokens.

    At first no more than are needed if all are as long as they may be. Later an eighth more than
    the mean length suggests: few documents take almost as long as a whole batch.
    """
    if written.documents == 0:
        return math.ceil(tokens / max_tokens)
    return math.ceil(1.125 * tokens * written.documents / written.tokens)


def _without_end_before(document: npt.NDArray[Any], tokenizer: Tokenizer) -> npt.NDArray[Any]:
    """A document without the end of another one, which a base without a start token began with."""
    begins_with_end = document[0] == tokenizer.document_end[-1]
    return document[1:] if begins_with_end else document


def _text_of(document: npt.NDArray[Any], tokenizer: Tokenizer) -> str:
    """The text of a document, without what precedes and ends it."""
    return tokenizer.decode(tokenizer.without_frame(document))


# Once in each worker, for all its units.
@lru_cache(maxsize=1)
def _loaded(
    base: Path, hashes: tuple[tuple[str, str], ...], device: str
) -> tuple[BaseWriter, Tokenizer]:
    """The base and its tokenizer; `hashes` make a changed base another one."""
    # Its imports take seconds, and every stage reads this module.
    from pipeline.extensions.self_generated.generation import BaseWriter

    tokenizer = load_tokenizer(base)
    return BaseWriter(base, tokenizer, device), tokenizer


def _batch_size(job: SamplingJob, spec: DecoderSpec) -> int:
    """How many documents to write at a time: as memory allows, with work for all units."""
    # Keys and values (2), in fp32 (4 bytes).
    bytes_per_token = 2 * 4 * spec.num_layers * spec.widths.num_key_value_heads * spec.head_dim
    in_memory = _CACHE_BYTES // (bytes_per_token * job.max_tokens)
    for_units = math.ceil(job.sampling.tokens / (_LEAST_UNITS * job.max_tokens))
    return max(1, min(_MAX_BATCH_SIZE, in_memory, for_units))
