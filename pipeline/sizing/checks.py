"""Opens and checks everything that a run's configuration names; collects all errors instead of raising the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.config.data import Sampling
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data import preprocess
from pipeline.data.corpora import check_heldout, corpus_jobs, is_tokenized, named_inputs, train_folder
from pipeline.data.token_corpus import load_manifest
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.units import input_files, is_here
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import ConfigError, UserError
from pipeline.inputs import (
    Samples,
    check_context,
    check_model,
    check_resume,
    check_sampling,
    check_trackers,
    check_vocabulary,
    encoded_prompts,
    extended_spec,
    open_layout,
    open_samples,
    with_new_rows,
)
from pipeline.methods.scale import check_named_expansion, made_expansion
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base, read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout, TensorParallel
from pipeline.run_folder.lock import check_folder
from pipeline.sizing.micro_batch import imagined_ranks

Result = TypeVar("Result")


class Faults:
    """The user errors that were found, in order, each once."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """The result of `work`; None where it raises a UserError, which is added to `errors`."""
        try:
            return work()
        except UserError as error:
            if str(error) not in map(str, self.errors):
                self.errors.append(error)
            return None

    def raise_all(self) -> None:
        """Raises a single error as it is, several as one ConfigError."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ConfigError(f"{len(self.errors)} faults: {'; '.join(map(str, self.errors))}")


@dataclass(frozen=True)
class Opened:
    """What a configuration names; None where it could not be opened. `fits`: whether the model can be built."""

    layout: Layout | None
    deepspeed: DeepSpeedConfig | None
    base: BaseFolder | None
    spec: DecoderSpec | None
    tokenizer: Tokenizer | None
    fits: bool


def validate_inputs(config: RunConfig, world_size: int, faults: Faults, base_config: Path | None = None) -> Opened:
    """Opens layout, DeepSpeed file, base and tokenizer for `world_size` ranks; adds the errors to `faults`.

    `base_config` is a config.json to use where the base's folder is missing.
    """
    layout, deepspeed = faults.attempt(lambda: open_layout(config, world_size)) or (None, None)
    faults.attempt(lambda: check_trackers(config))
    base = faults.attempt(lambda: with_new_rows(config, open_base(config.base)))
    if base is not None:
        faults.attempt(lambda: base.file_of)  # reads every weight file's header
    spec = base.spec if base is not None else None
    if spec is None and base_config is not None:
        spec = faults.attempt(lambda: extended_spec(config, read_spec(base_config)))
    fits = False
    if spec is not None:
        faults.attempt(lambda: check_context(config, spec))
        found = len(faults.errors)
        faults.attempt(lambda: check_model(config, spec, _imagined(config)))
        fits = len(faults.errors) == found
    if isinstance(config.method, ScaleMethod):
        faults.attempt(lambda: check_named_expansion(config.upscaled))
    faults.attempt(lambda: check_heldout(config))
    # A missing base is already in `faults`.
    tokenizer = faults.attempt(lambda: load_tokenizer(config.tokenizer)) if config.tokenizer.exists() else None
    if spec is not None and tokenizer is not None:
        faults.attempt(lambda: check_vocabulary(tokenizer, spec))
        faults.attempt(lambda: encoded_prompts(config, tokenizer, spec))
        for corpus in config.data.corpora.values():
            if (sample := corpus.sample) is not None:
                faults.attempt(lambda sample=sample: _check_sampling(config, sample, tokenizer, spec))  # type: ignore[misc]
    return Opened(layout, deepspeed, base, spec, tokenizer, fits)


def _check_sampling(config: RunConfig, sample: Sampling, tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    # A sequence length beyond the context is a fault of its own.
    longest = min(config.data.sequence_length, spec.longest_text)
    check_sampling(sample, sample.max_tokens or longest, tokenizer, spec)


def check_expansion(config: RunConfig, opened: Opened, faults: Faults) -> None:
    """Adds to `faults` that the initial expansion is of another base or other settings; reads the whole base."""
    if (base := opened.base) is not None:
        faults.attempt(lambda: made_expansion(config, base))


def check_resume_of(config: RunConfig, opened: Opened, faults: Faults) -> None:
    """Adds to `faults` that the run folder cannot be used now, or that the run's checkpoint is of another run."""
    faults.attempt(lambda: check_folder(config.folder))
    check_expansion(config, opened, faults)
    base, tokenizer = opened.base, opened.tokenizer
    if base is not None and tokenizer is not None and opened.fits and config.folder.is_dir():
        faults.attempt(lambda: check_resume(config, base, tokenizer.fingerprint))


def check_fits(config: RunConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError where the run's method or sequence length does not fit a base of that architecture."""
    check_context(config, spec)
    check_model(config, spec, _imagined(config))


def _imagined(config: RunConfig) -> TensorParallel:
    parallel = config.parallel
    return imagined_ranks(parallel.tp_size, [], sequence_parallel=parallel.sequence_parallel)


def check_before_tokenizing(config: RunConfig, world_size: int | None) -> None:
    """Finds what would stop the training before hours are spent on tokenizing.

    `world_size` defaults to one tensor-parallel group of ranks.

    Raises:
        UserError: names every error.
    """
    faults = Faults()
    opened = validate_inputs(config, world_size or config.parallel.tp_size, faults)
    if not is_tokenized(config.data):  # every restart of a run passes here, and a base may have hundreds of GB
        check_expansion(config, opened, faults)
    faults.raise_all()


@dataclass(frozen=True)
class CorpusPlan:
    """One corpus of a run.

    `tokens` and `epochs` are None until it is made, and `epochs` also where the run does not read it.
    `validation_sequences` is how many of its held-out sequences each validation reads.
    """

    name: str
    role: str
    tokens: int | None
    epochs: float | None
    validation_sequences: int | None


def plan_corpora(config: RunConfig, tokenizer: Tokenizer | None, faults: Faults) -> tuple[CorpusPlan, ...]:
    """The corpora of the run; adds to `faults` what is wrong with them or, before tokenizing, with their input files.

    `tokenizer` is the base's; with None any tokenizer is accepted.
    """
    samples: Samples | None = None
    if is_tokenized(config.data):
        fingerprint = None if tokenizer is None else tokenizer.fingerprint
        samples = faults.attempt(lambda: open_samples(config, fingerprint))
    elif config.data.folder.resolve() != config.folder.resolve():
        faults.attempt(lambda: check_folder(config.data.folder))
    if tokenizer is not None:
        for job in corpus_jobs(config.data, config.tokenizer):
            if faults.attempt(lambda job=job: is_here(job.inputs)):  # type: ignore[misc]
                faults.attempt(lambda job=job: preprocess.check_folder(job, tokenizer))  # type: ignore[misc]
    else:
        for files in named_inputs(config.data):
            if faults.attempt(lambda files=files: is_here(files)):  # type: ignore[misc]
                faults.attempt(lambda files=files: input_files(files))  # type: ignore[misc]
    samples_read = config.schedule.steps * config.schedule.global_batch_size
    epochs = samples.training.epochs_after(samples_read) if samples else {}
    plans = []
    for name, corpus in config.data.corpora.items():
        heldout = samples.heldout.get(name) if samples else None
        plans.append(
            CorpusPlan(
                name=name,
                role=corpus.role,
                tokens=load_manifest(train_folder(config.data, name)).tokens if samples else None,
                epochs=epochs.get(name),
                validation_sequences=None if heldout is None else min(len(heldout), config.validation.max_sequences),
            )
        )
    return tuple(plans)
