"""Opens and checks what a run names, and collects every fault instead of raising the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.corpora import corpus_jobs, is_tokenized, train_folder
from pipeline.data.token_corpus import TokenCorpus, load_manifest
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.units import input_files
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import ConfigError, UserError
from pipeline.inputs import Samples, check_context, check_model, check_vocabulary, open_layout, open_samples
from pipeline.methods.scale import check_named_expansion
from pipeline.model.from_hf import open_base, read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout, TensorParallel
from pipeline.sizing.micro_batch import imagined_ranks

Result = TypeVar("Result")


class Faults:
    """The faults that a user can mend, in the order in which they were found."""

    def __init__(self) -> None:
        self.met: list[UserError] = []

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """The result of `work`; None where it raises a UserError, which is noted."""
        try:
            return work()
        except UserError as error:
            self.met.append(error)
            return None

    def raise_all(self) -> None:
        """Raises a single fault as it is, several as one ConfigError."""
        if len(self.met) == 1:
            raise self.met[0]
        if self.met:
            raise ConfigError(f"{len(self.met)} faults: {'; '.join(map(str, self.met))}")


@dataclass(frozen=True)
class Opened:
    """What could be opened; None where it could not."""

    layout: Layout | None
    deepspeed: DeepSpeedConfig | None
    spec: DecoderSpec | None
    tokenizer: Tokenizer | None


def validate_inputs(config: RunConfig, world_size: int, faults: Faults, base_config: Path | None = None) -> Opened:
    """Opens layout, DeepSpeed file, base and its tokenizer for `world_size` ranks; notes in `faults` what is wrong.

    `base_config` is a config.json to use where the base's folder is missing.
    """
    arranged = faults.attempt(lambda: open_layout(config, world_size))
    base = faults.attempt(lambda: open_base(config.base))
    if base is not None:
        faults.attempt(lambda: base.file_of)  # every weight file's header
    spec = base.spec if base is not None else None
    if spec is None and base_config is not None:
        spec = faults.attempt(lambda: read_spec(base_config))
    if spec is not None:
        faults.attempt(lambda: check_context(config, spec))
        faults.attempt(lambda: check_model(config, spec, _imagined(config)))
    if isinstance(config.method, ScaleMethod):
        faults.attempt(lambda: check_named_expansion(config.upscaled))
    # A missing base is noted above.
    tokenizer = faults.attempt(lambda: load_tokenizer(config.base)) if config.base.exists() else None
    if spec is not None and tokenizer is not None:
        faults.attempt(lambda: check_vocabulary(tokenizer, spec))
    layout, deepspeed = arranged or (None, None)
    return Opened(layout, deepspeed, spec, tokenizer)


def check_fits(config: RunConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError where the run's method or samples do not fit a base of that architecture."""
    check_context(config, spec)
    check_model(config, spec, _imagined(config))


def _imagined(config: RunConfig) -> TensorParallel:
    parallel = config.parallel
    return imagined_ranks(parallel.tp_size, [], sequence_parallel=parallel.sequence_parallel)


def check_before_tokenizing(config: RunConfig, world_size: int | None) -> None:
    """Finds what would stop the training before the hours of tokenizing.

    Without `world_size` it checks for one tensor-parallel group of ranks.

    Raises:
        UserError: with every fault.
    """
    faults = Faults()
    validate_inputs(config, world_size or config.parallel.tp_size, faults)
    faults.raise_all()


@dataclass(frozen=True)
class CorpusPlan:
    """One corpus of a run. `tokens` and `epochs` are None until it is tokenized; `epochs` also if it is not drawn from.

    `validation_sequences` are those of its held-out part that each validation reads.
    """

    name: str
    role: str
    tokens: int | None
    epochs: float | None
    validation_sequences: int | None


def plan_corpora(config: RunConfig, tokenizer: Tokenizer | None, faults: Faults) -> tuple[CorpusPlan, ...]:
    """The corpora of the run; notes in `faults` what is wrong with them or, before tokenizing, with their inputs.

    `tokenizer` is the base's; None accepts corpora of any.
    """
    samples = _open_all(config, tokenizer, faults) if is_tokenized(config.data) else None
    epochs = samples.training.epochs_after(samples_needed(config)) if samples else {}
    if samples is None and not faults.met:
        for job in corpus_jobs(config.data, config.base):
            faults.attempt(lambda job=job: input_files(job.inputs))  # type: ignore[misc]
    return tuple(_plans(config, samples, epochs))


def samples_needed(config: RunConfig) -> int:
    """How many samples the whole run reads."""
    return config.schedule.steps * config.schedule.global_batch_size


def _open_all(config: RunConfig, tokenizer: Tokenizer | None, faults: Faults) -> Samples | None:
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    samples = faults.attempt(lambda: open_samples(config, fingerprint))
    for name in config.data.corpora:
        faults.attempt(lambda name=name: TokenCorpus(train_folder(config.data, name)).check())  # type: ignore[misc]
    return samples


def _plans(config: RunConfig, samples: Samples | None, epochs: dict[str, float]) -> Iterator[CorpusPlan]:
    for name, corpus in config.data.corpora.items():
        heldout = samples.heldout.get(name) if samples else None
        yield CorpusPlan(
            name=name,
            role=corpus.role,
            tokens=load_manifest(train_folder(config.data, name)).tokens if samples else None,
            epochs=epochs.get(name),
            validation_sequences=min(len(heldout), config.validation.max_sequences) if heldout is not None else None,
        )
