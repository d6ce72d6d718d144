"""The checks of what a run reads, before any rank allocates memory. Nothing here communicates with other ranks."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import NamedTuple

import torch

from pipeline import log
from pipeline.checkpoint.folder import candidates
from pipeline.checkpoint.manifest import SAME_MODEL, SAME_OVER_A_RUN, check_same_run, describe_run, load_manifest
from pipeline.config.run import RunConfig
from pipeline.data.samples import HeldoutSamples, TrainingSamples, load_heldout
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.vocabulary import read_vocabulary
from pipeline.deepspeed_config import DeepSpeedConfig, accumulation_steps, check_stage, load_deepspeed_config
from pipeline.errors import ConfigError, DamagedCheckpointError, DataError, MissingPackageError
from pipeline.methods import build_model
from pipeline.methods.method import TrainingMethod
from pipeline.model.base_folder import BaseFolder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE, Layout, TensorParallel
from pipeline.run_folder.status import is_trained
from pipeline.sizing.micro_batch import imagined_ranks

_logger = log.get_logger(__name__)


class Samples(NamedTuple):
    """The training and held-out samples of a run."""

    training: TrainingSamples
    heldout: dict[str, HeldoutSamples]

    @property
    def corpora(self) -> list[TokenCorpus]:
        """The corpora that they are read from."""
        packed = (*self.training.corpora.values(), *(part.packed for part in self.heldout.values()))
        return [each.source for each in packed]


class Inputs(NamedTuple):
    """What rank 0 read from the files of a run, with what is cached in it; picklable, so that it can be broadcast.

    Attributes:
        starts_at_base: whether the model's logits must equal the base's before the first step.
        finished: whether an earlier attempt finished the run.
    """

    config: RunConfig
    deepspeed_config: DeepSpeedConfig
    layout: Layout
    base: BaseFolder
    tokenizer_fingerprint: str
    samples: Samples
    method: TrainingMethod
    starts_at_base: bool = True
    finished: bool = False


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


def open_samples(config: RunConfig, tokenizer_fingerprint: str | None) -> Samples:
    """The corpora of a run whose tokenizer has that fingerprint; None accepts any.

    Raises:
        DataError: a corpus is missing, unfinished, damaged or of another tokenizer, or all end before the last step.
    """
    sampled = None if config.vocabulary is None else read_vocabulary(config.vocabulary.folder).base_tokenizer
    training = TrainingSamples(
        config.data, seed=config.seed, tokenizer_fingerprint=tokenizer_fingerprint, sampled_fingerprint=sampled
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


def check_fits(config: RunConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError where the run's method, layout or sequence length does not fit a base of that architecture."""
    check_context(config, spec)
    parallel = config.parallel
    check_model(config, spec, imagined_ranks(parallel.tp_size, Counter(), sequence_parallel=parallel.sequence_parallel))


def check_resume(config: RunConfig, base: BaseFolder, tokenizer_fingerprint: str) -> bool:
    """Whether an earlier attempt finished the run, which is logged. The checkpoints' files are not read.

    Raises:
        CheckpointError: the newest checkpoint is of another base, base_precision or method, or, unless the run is
            finished, of other data.
    """
    for checkpoint in candidates(config.checkpoint_folder):
        try:
            manifest = load_manifest(checkpoint)
        except DamagedCheckpointError:
            continue  # resuming reports it, and takes the one before
        with torch.device("meta"):
            model = build_model(config, base.spec, SINGLE)
        run = describe_run(config, base, model, tokenizer_fingerprint)
        finished = is_trained(config.folder) and manifest.position.is_end_of(config)  # not if steps were added
        check_same_run(manifest, checkpoint, run, SAME_MODEL if finished else SAME_OVER_A_RUN)
        if finished:
            _logger.info("%s is trained to step %d: nothing to train", config.folder, manifest.position.step)
        return finished
    return False
