"""One training run, from its configuration to its summary; it goes on where an earlier attempt stopped."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline import log, methods
from pipeline.checkpoint.manifest import Position, check_same_model, describe_layout, describe_run, load_manifest
from pipeline.config import RunConfig, load_config
from pipeline.data.samples import HeldoutSamples, TrainingSamples, load_heldout
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.files import write_json
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import open_base
from pipeline.parallel.topology import Layout, ProcessGroups, TensorParallel
from pipeline.training.batches import TrainingBatches
from pipeline.training.building import build_model
from pipeline.training.checkpoint import Checkpoints, latest_checkpoint, remove_unfinished
from pipeline.training.deepspeed_config import DeepSpeedConfig, accumulation_steps, load_deepspeed_config
from pipeline.training.diagnostics import make_probe
from pipeline.training.engine import Engine
from pipeline.training.gate import check_preservation
from pipeline.training.launch import COLLECTIVE_TIMEOUT
from pipeline.training.loop import Outcome, Trainer, train
from pipeline.training.metrics import Metrics
from pipeline.training.progress import Progress
from pipeline.training.signals import RESUME_LATER, StopSignals
from pipeline.training.unison import from_first_rank, in_unison
from pipeline.training.validation import Validation

SUMMARY = "training.json"
_logger = log.get_logger(__name__)


class Inputs(NamedTuple):
    """What a run reads, checked before the ranks begin to talk to each other."""

    config: RunConfig
    deepspeed_config: DeepSpeedConfig
    layout: Layout
    base: BaseFolder
    tokenizer_fingerprint: str
    training: TrainingSamples
    heldout: dict[str, HeldoutSamples]


def run_training(config_path: Path, device: torch.device) -> int:
    """Trains the run that `config_path` describes; every rank must call it. Returns the exit code.

    Raises:
        UserError: on the first rank that met it; the others leave without a word.
    """
    with StopSignals() as signals:
        inputs = in_unison(lambda: read_inputs(config_path))
        if from_first_rank(lambda: is_finished(inputs.config, inputs.base)):
            return 0
        trainer, position, difference = prepare(inputs, device)
        outcome = train(trainer, position, signals)
        trainer.progress.close()
        trainer.metrics.close()
        if not outcome.finished:
            _logger.info("stopped by a signal at step %d; the same command goes on from there", outcome.position.step)
            return RESUME_LATER
        summarise(trainer, outcome, difference)
        return 0


def read_inputs(config_path: Path) -> Inputs:
    """Opens and checks everything that the run reads, except for the weights themselves."""
    config = load_config(config_path)
    layout = Layout(dist.get_world_size(), config.parallel.tp_size)
    accumulation_steps(config.schedule, layout.dp_size)
    deepspeed_config = load_deepspeed_config(config.deepspeed, layout)
    base = open_base(config.base)
    check_can_be_exported(config)
    check_context(config, base)
    fingerprint = load_tokenizer(config.base).fingerprint
    training = TrainingSamples(config.data, seed=config.seed, tokenizer_fingerprint=fingerprint)
    needed = config.schedule.steps * config.schedule.global_batch_size
    if training.total is not None and training.total < needed:
        raise DataError(
            f"schedule.steps: {config.schedule.steps} steps need {needed} sequences, but the corpora's epochs and "
            f"token budgets end after {training.total}; "
            f"use at most {training.total // config.schedule.global_batch_size} steps"
        )
    heldout = load_heldout(config.data, tokenizer_fingerprint=fingerprint)
    return Inputs(config, deepspeed_config, layout, base, fingerprint, training, heldout)


def check_can_be_exported(config: RunConfig) -> None:
    """Raises ConfigError for a method whose checkpoints nothing could read later."""
    if config.method.name not in ("scale", "fft"):
        raise ConfigError(
            f"method.name: {config.method.name} can be built and estimated, but its checkpoints cannot be converted "
            "yet; use scale or fft"
        )


def check_context(config: RunConfig, base: BaseFolder) -> None:
    """Raises ConfigError where samples are longer than what the base was made for."""
    longest = base.spec.max_position_embeddings
    if config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is beyond the base's context of {longest} tokens; "
            f"use at most {longest}"
        )


def is_finished(config: RunConfig, base: BaseFolder) -> bool:
    """Whether an earlier attempt came to the end; says so if it did.

    Raises:
        CheckpointError: it did, but with another base or method than the configuration now has.
    """
    checkpoint = latest_checkpoint(config.folder / "checkpoints")
    if checkpoint is None or not (config.folder / SUMMARY).exists():
        return False
    manifest = load_manifest(checkpoint)
    if manifest.position.step < config.schedule.steps:
        return False
    check_same_model(manifest, checkpoint, base.hashes(), config.method)
    _logger.info(
        "%s is already at step %d of %d: nothing to train", config.folder, manifest.position.step, config.schedule.steps
    )
    return True


def prepare(inputs: Inputs, device: torch.device) -> tuple[Trainer, Position, float | None]:
    """Everything the loop drives, where it begins, and how far the widened model was from its base before any step."""
    config, layout, rank = inputs.config, inputs.layout, dist.get_rank()
    torch.manual_seed(config.seed)
    groups = ProcessGroups(layout, COLLECTIVE_TIMEOUT)
    base = with_shared_hashes(inputs.base)
    model = load_model(inputs, base, groups)
    run = describe_run(config, base, model, inputs.tokenizer_fingerprint)
    engine = Engine(model, config, inputs.deepspeed_config, groups)
    batches = TrainingBatches(inputs.training, config, layout, rank, device)
    # Before the checkpoint is read: it also tells whether base and expansion arrived as they were.
    probe = next(batches.of_step(0))
    difference = check_preservation(engine, probe, str(config.upscaled_folder))

    folder = config.folder / "checkpoints"
    layout_record = describe_layout(layout, inputs.deepspeed_config.zero_stage, inputs.deepspeed_config.dtype)
    checkpoints = Checkpoints(
        folder,
        run,
        layout_record,
        keep_last=config.checkpoints.keep_last,
        asynchronous=config.checkpoints.asynchronous,
    )
    position = Position(step=0, tokens_seen=0, seconds=0.0)
    latest = from_first_rank(lambda: latest_checkpoint(folder))
    if latest is not None:
        position = checkpoints.resume(engine, latest)
        _logger.info("goes on from %s", latest)
    if rank == 0:
        remove_unfinished(folder)
    trainer = Trainer(
        config,
        engine,
        batches,
        Validation(inputs.heldout, config, layout, rank, device),
        make_probe(inputs.heldout, config, probe),
        Metrics(config.folder, position.step, writer=rank == 0),
        checkpoints,
        Progress(position.step, config.schedule.steps, visible=rank == 0),
    )
    return trainer, position, difference


def with_shared_hashes(base: BaseFolder) -> BaseFolder:
    """`base`, knowing its hashes: the first rank reads every byte of it, and tells the others."""
    return replace(base, known_hashes=from_first_rank(base.hashes))


def load_model(inputs: Inputs, base: BaseFolder, groups: ProcessGroups) -> Decoder:
    """The model before its first step; each rank reads no more than it will hold."""
    config, tp = inputs.config, groups.tensor_parallel
    started = time.perf_counter()
    in_unison(lambda: check_model(inputs, tp))
    model = build_model(config, base, inputs.deepspeed_config, groups)
    in_unison(lambda: methods.load_initial_weights(model, config, base, tp))
    _logger.info("loaded %s in %.1f s", base.path, time.perf_counter() - started)
    return model


def check_model(inputs: Inputs, tp: TensorParallel) -> None:
    """Raises what building the model would, without any memory or message."""
    with torch.device("meta"):
        methods.build_model(inputs.config, inputs.base, tp)


def summarise(trainer: Trainer, outcome: Outcome, difference: float | None) -> None:
    """Writes the run's figures to training.json; its presence says that the run is finished."""
    engine, config = trainer.engine, trainer.config
    optimizer_state_elements = engine.optimizer_state_elements()
    if dist.get_rank() != 0:
        return
    checkpoint = latest_checkpoint(config.folder / "checkpoints")
    values = {
        "step0_max_abs_logit_difference": difference,
        "trainable_parameters": engine.trainable_parameters,
        "total_parameters": engine.total_parameters,
        "optimizer_state_elements": optimizer_state_elements,
        "steps": outcome.position.step,
        "tokens_seen": outcome.position.tokens_seen,
        "seconds": round(outcome.position.seconds, 3),
        "validation": {
            name: {"perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
            for name, score in outcome.scores.items()
        },
        "checkpoint": str(checkpoint),
        "tensorboard": str(config.folder / "tensorboard"),
    }
    write_json(config.folder / SUMMARY, values)
    for name, score in outcome.scores.items():
        _logger.info("%s: perplexity %.3f, %.4f bits per byte", name, score.perplexity, score.bits_per_byte)
    _logger.info("trained %d steps; wrote %s", outcome.position.step, config.folder / SUMMARY)
