"""What a run reads, checked before any rank allocates memory. Nothing here communicates with other ranks."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline import log
from pipeline.checkpoint.folder import candidates
from pipeline.checkpoint.manifest import check_same_model, check_same_run, describe_run, load_manifest
from pipeline.config.data import Sampling
from pipeline.config.run import RunConfig, VocabularySettings
from pipeline.data.samples import HeldoutSamples, TrainingSamples, load_heldout
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.vocabulary import RECORD, read_vocabulary
from pipeline.deepspeed_config import DeepSpeedConfig, accumulation_steps, load_deepspeed_config
from pipeline.errors import BaseModelError, ConfigError, DamagedCheckpointError, DataError, MissingPackageError
from pipeline.methods import build_model, training_method
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base
from pipeline.model.new_rows import NewRows
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE, Layout, TensorParallel
from pipeline.run_folder.status import TRAINING

_logger = log.get_logger(__name__)


class Samples(NamedTuple):
    """The training and held-out samples of a run. Each rank opens its own, because they hold memory-mapped files."""

    training: TrainingSamples
    heldout: dict[str, HeldoutSamples]


class Inputs(NamedTuple):
    """What rank 0 read from the files of a run, picklable so that it can be broadcast.

    Attributes:
        starts_at_base: whether the model's logits must equal the base's before the first step.
        finished: whether an earlier attempt finished the run. Then nothing after the corpora was checked.
    """

    config: RunConfig
    deepspeed_config: DeepSpeedConfig
    layout: Layout
    base: BaseFolder
    tokenizer_fingerprint: str
    starts_at_base: bool = True
    finished: bool = False


def read_inputs(config: RunConfig, world_size: int) -> Inputs:
    """Reads and checks everything that a run names, except for weights and the files of checkpoints.

    Raises:
        UserError: the first fault; see the functions below.
    """
    layout, deepspeed_config = open_layout(config, world_size)
    check_trackers(config)
    base = with_new_rows(config, open_base(config.base))
    check_context(config, base.spec)
    tokenizer = load_tokenizer(config.tokenizer)
    check_vocabulary(tokenizer, base.spec)
    encoded_prompts(config, tokenizer, base.spec)
    open_samples(config, tokenizer.fingerprint)
    inputs = Inputs(config, deepspeed_config, layout, base, tokenizer.fingerprint)
    if check_resume(config, base, tokenizer.fingerprint):
        return inputs._replace(finished=True)
    return inputs._replace(starts_at_base=training_method(config).starts_at_base())


def with_new_rows(config: RunConfig, base: BaseFolder) -> BaseFolder:
    """The base of a run, with a row for each piece by which the run extends its vocabulary.

    Raises:
        DataError: the extended tokenizer is missing, damaged, or of another base.
    """
    if config.vocabulary is None:
        return base
    new_rows = _open_new_rows(config.vocabulary, config.base, base.spec)
    return replace(base, spec=replace(base.spec, new_rows=len(new_rows)), new_rows=new_rows)


def extended_spec(config: RunConfig, spec: DecoderSpec) -> DecoderSpec:
    """The architecture of a run's base with the new rows of the run, where there may be no base. Raises the same."""
    if config.vocabulary is None:
        return spec
    return replace(spec, new_rows=len(_open_new_rows(config.vocabulary, config.base, spec)))


def _open_new_rows(settings: VocabularySettings, base: Path, spec: DecoderSpec) -> NewRows:
    record = read_vocabulary(settings.folder)
    again = "make it again with tools/extend_vocabulary.py"
    if load_tokenizer(settings.folder).fingerprint != record.tokenizer:
        raise DataError(f"{settings.folder}: its tokenizer is not the one that {RECORD} describes; {again}")
    if record.base_rows != spec.vocab_size or (
        base.exists() and load_tokenizer(base).fingerprint != record.base_tokenizer
    ):
        raise DataError(
            f"vocabulary.folder: {settings.folder} extends another tokenizer than that of {base}, or its first new id, "
            f"{record.base_rows}, is not the base's vocab_size {spec.vocab_size}; {again} from this base"
        )
    return NewRows([piece.replaces for piece in record.pieces], settings.initial, record.tokenizer)


def open_layout(config: RunConfig, world_size: int) -> tuple[Layout, DeepSpeedConfig]:
    """The layout of the ranks, and the DeepSpeed configuration.

    Raises:
        LayoutError: the ranks, or the batch, do not divide.
        ConfigError: the DeepSpeed file is missing or unsupported, a rank to be traced does not exist, or a setting
            excludes ZeRO-3.
    """
    layout = Layout(world_size, config.parallel.tp_size)
    accumulation_steps(config.schedule, layout.dp_size)
    profile = config.profile
    if profile.steps is not None and max(profile.ranks, default=0) >= world_size:
        raise ConfigError(
            f"profile.ranks: rank {max(profile.ranks)} of {world_size} ranks; they count from 0, name those that exist"
        )
    deepspeed_config = load_deepspeed_config(config.deepspeed, layout)
    check_stage(config, deepspeed_config.zero_stage)
    return layout, deepspeed_config


def check_stage(config: RunConfig, zero_stage: int) -> None:
    """Raises ConfigError where a setting excludes ZeRO-3, and that is the stage."""
    if zero_stage == 3 and (why := why_not_zero3(config)) is not None:
        setting, reason = why
        raise ConfigError(
            f"{setting}: expected ZeRO-1 or 2, found ZeRO-3 in {config.deepspeed}: {reason}; remove the setting, or "
            "name another deepspeed file"
        )


def why_not_zero3(config: RunConfig) -> tuple[str, str] | None:
    """The setting that excludes ZeRO-3, and the reason; None where none does."""
    if config.compile:
        return "compile", "a layer that gathers its parameters cannot be compiled"
    if config.base_precision != "bf16":
        return "base_precision", f"a base in {config.base_precision} is held whole by every rank"
    return None


def check_trackers(config: RunConfig) -> None:
    """Raises MissingPackageError where `observers` names a tracker whose package is not installed."""
    for name in ("wandb", "mlflow"):
        if getattr(config.observers, name) is not None and find_spec(name) is None:
            raise MissingPackageError(
                f"observers.{name}: the package is missing; pip install 'scale-cpt[{name}]', or remove the section"
            )


def check_context(config: RunConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError where samples are longer than the base's context."""
    longest = spec.longest_text
    if config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is beyond the base's context of {longest} tokens; "
            f"use at most {longest}"
        )


def encoded_prompts(config: RunConfig, tokenizer: Tokenizer, spec: DecoderSpec) -> list[list[int]]:
    """The ids of each of `validation.prompts`, with what precedes a document.

    Raises:
        ConfigError: one is empty, or leaves no room in the base's context for what the model is to write.
    """
    settings = config.validation
    room = spec.longest_text - settings.prompt_tokens
    prompts = [
        [*tokenizer.before_document, *tokenizer.reference.encode([text]).ids.tolist()] for text in settings.prompts
    ]
    for text, ids in zip(settings.prompts, prompts, strict=True):
        if not 0 < len(ids) <= room:
            raise ConfigError(
                f"validation.prompts: {text[:60]!r} has {len(ids)} tokens; expected 1 to {room}, the base's context of "
                f"{spec.longest_text} less prompt_tokens {settings.prompt_tokens}"
            )
    return prompts


def check_vocabulary(tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    """Raises BaseModelError where some ids have no row in the embedding.

    Tensor-parallel ranks would silently read such a token as zeros, and a single GPU would fail.
    """
    if tokenizer.vocab_size > spec.vocab_size + spec.new_rows:
        raise BaseModelError(
            f"{tokenizer.path}: has ids up to {tokenizer.vocab_size - 1}, but the base's vocab_size is "
            f"{spec.vocab_size}; give the base a row for each (resize_token_embeddings of transformers), or remove the "
            "tokens beyond from the tokenizer"
        )


def check_sampling(sampling: Sampling, max_tokens: int, tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    """Checks that a base can write documents of at most `max_tokens` tokens.

    Raises:
        ConfigError: its context is too short, or an opening leaves no room.
    """
    if max_tokens > spec.longest_text:
        raise ConfigError(
            f"max_tokens: {max_tokens} is beyond the base's context of {spec.longest_text} tokens; use at "
            f"most {spec.longest_text}"
        )
    frame = len(tokenizer.before_document) + len(tokenizer.document_end)
    least = frame + (sampling.opening_tokens or 0) + 1
    if max_tokens < least:
        raise ConfigError(
            f"max_tokens: {max_tokens} leaves the base nothing to write after opening_tokens "
            f"({sampling.opening_tokens or 0}) and the tokens around a document ({frame}); use at least {least}"
        )


def open_samples(config: RunConfig, tokenizer_fingerprint: str | None) -> Samples:
    """The corpora of a run whose tokenizer has that fingerprint; None accepts any.

    Raises:
        DataError: a corpus is missing, unfinished, damaged or of another tokenizer, or all end before the last step.
    """
    sampled = None if config.vocabulary is None else read_vocabulary(config.vocabulary.folder).base_tokenizer
    training = TrainingSamples(
        config.data,
        seed=config.seed,
        tokenizer_fingerprint=tokenizer_fingerprint,
        sampled_fingerprint=sampled,
    )
    needed = config.schedule.steps * config.schedule.global_batch_size
    if training.total is not None and training.total < needed:
        raise DataError(
            f"schedule.steps: {config.schedule.steps} steps need {needed} sequences, but the corpora's epochs and "
            f"token budgets end after {training.total}; "
            f"use at most {training.total // config.schedule.global_batch_size} steps"
        )
    return Samples(training, load_heldout(config.data, tokenizer_fingerprint=tokenizer_fingerprint))


def check_model(config: RunConfig, spec: DecoderSpec, tp: TensorParallel) -> None:
    """Raises what building the model would, without memory or communication."""
    with torch.device("meta"):
        build_model(config, spec, tp)


def check_resume(config: RunConfig, base: BaseFolder, tokenizer_fingerprint: str) -> bool:
    """Whether an earlier attempt finished the run, which is logged. The checkpoints' files are not read.

    Raises:
        CheckpointError: the newest checkpoint is of another base, base_precision or method, or, unless the run is
            finished, of other data.
    """
    for checkpoint in candidates(config.folder / "checkpoints"):
        try:
            manifest = load_manifest(checkpoint)
        except DamagedCheckpointError:
            continue  # resuming reports it, and takes the one before
        step, steps = manifest.position.step, config.schedule.steps
        if (config.folder / TRAINING).exists() and manifest.position.is_end_of(config):
            check_same_model(manifest, checkpoint, base.hashes(), config)
            _logger.info("%s is already at step %d of %d: nothing to train", config.folder, step, steps)
            return True
        with torch.device("meta"):
            model = build_model(config, base.spec, SINGLE)
        check_same_run(manifest, checkpoint, describe_run(config, base, model, tokenizer_fingerprint))
        return False
    return False
