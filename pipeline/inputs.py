"""What a run reads, opened and checked before any rank holds anything; nothing here needs the other ranks' answers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pipeline.config.run import Profile, RunConfig
from pipeline.data.samples import HeldoutSamples, TrainingSamples, load_heldout
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.deepspeed_config import DeepSpeedConfig, accumulation_steps, load_deepspeed_config
from pipeline.errors import BaseModelError, ConfigError, DataError
from pipeline.methods import training_method
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout, TensorParallel, check_sequence_length


class Samples(NamedTuple):
    """What a run learns from, and what it is tested on."""

    training: TrainingSamples
    heldout: dict[str, HeldoutSamples]


class Inputs(NamedTuple):
    """Everything that a run reads, except for the weights themselves."""

    config: RunConfig
    deepspeed_config: DeepSpeedConfig
    layout: Layout
    base: BaseFolder
    tokenizer_fingerprint: str
    training: TrainingSamples
    heldout: dict[str, HeldoutSamples]


def open_layout(config: RunConfig, world_size: int) -> tuple[Layout, DeepSpeedConfig]:
    """How the ranks are arranged, and what DeepSpeed is told.

    Raises:
        LayoutError: the ranks, or the batch, do not divide.
        ConfigError: the DeepSpeed file is missing or asks for what does not work, or a rank to be traced is not there.
    """
    layout = Layout(world_size, config.parallel.tp_size)
    accumulation_steps(config.schedule, layout.dp_size)
    check_traced_ranks(config.profile, world_size)
    return layout, load_deepspeed_config(config.deepspeed, layout)


def open_fitting_base(config: RunConfig) -> BaseFolder:
    """The base, whose context is long enough for the run's samples.

    Raises:
        BaseModelError: it is missing, damaged, or of an architecture that we do not know.
        ConfigError: its context is too short.
    """
    base = open_base(config.base)
    check_context(config, base.spec)
    return base


def open_fitting_tokenizer(config: RunConfig, spec: DecoderSpec) -> Tokenizer:
    """The base's tokenizer, for each of whose ids the base has a row.

    Raises:
        DataError: it is missing or damaged.
        BaseModelError: it has more ids than the base has rows.
    """
    tokenizer = load_tokenizer(config.base)
    check_vocabulary(tokenizer, spec)
    return tokenizer


def open_samples(config: RunConfig, tokenizer_fingerprint: str | None) -> Samples:
    """The corpora of a run whose base has the tokenizer of that fingerprint; None takes any.

    Raises:
        DataError: one is missing, unfinished, damaged, of another tokenizer, or all are used up before the last step.
    """
    training = TrainingSamples(config.data, seed=config.seed, tokenizer_fingerprint=tokenizer_fingerprint)
    needed = config.schedule.steps * config.schedule.global_batch_size
    if training.total is not None and training.total < needed:
        raise DataError(
            f"schedule.steps: {config.schedule.steps} steps need {needed} sequences, but the corpora's epochs and "
            f"token budgets end after {training.total}; "
            f"use at most {training.total // config.schedule.global_batch_size} steps"
        )
    return Samples(training, load_heldout(config.data, tokenizer_fingerprint=tokenizer_fingerprint))


def check_vocabulary(tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    """Raises BaseModelError where some ids have no row in the embedding: tensor-parallel ranks would take such a token
    for zeros without a word, and a GPU alone would stop at it."""
    if tokenizer.vocab_size > spec.vocab_size:
        raise BaseModelError(
            f"{tokenizer.path}: has ids up to {tokenizer.vocab_size - 1}, but the base's vocab_size is "
            f"{spec.vocab_size}; give the base a row for each (resize_token_embeddings of transformers), or take the "
            "tokens beyond out of the tokenizer"
        )


def check_context(config: RunConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError where samples are longer than what the base was made for."""
    longest = spec.max_position_embeddings
    if config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is beyond the base's context of {longest} tokens; "
            f"use at most {longest}"
        )


def check_model(config: RunConfig, spec: DecoderSpec, tp: TensorParallel) -> None:
    """Raises what building the model would, without any memory or message."""
    check_sequence_length(config.data.sequence_length, tp)
    with torch.device("meta"):
        training_method(config).build(spec, tp, config.activation_checkpointing)


def check_traced_ranks(profile: Profile, world_size: int) -> None:
    """Raises ConfigError where a rank that is to be traced does not exist."""
    if profile.steps is not None and max(profile.ranks, default=0) >= world_size:
        raise ConfigError(
            f"profile.ranks: rank {max(profile.ranks)} of {world_size} ranks; they count from 0, name those that exist"
        )
