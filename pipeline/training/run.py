"""One training run, from its configuration to its summary; it goes on where an earlier attempt stopped."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline import log, methods
from pipeline.checkpoint.folder import candidates, latest_checkpoint, remove_unfinished
from pipeline.checkpoint.manifest import check_same_model, describe_layout, describe_run, load_manifest
from pipeline.checkpoint.position import Position
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import DamagedCheckpointError, UserError
from pipeline.exit_codes import FINISHED, RESUME_LATER
from pipeline.files import file_hash, write_json
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.parallel.topology import ProcessGroups
from pipeline.run_folder.attempts import record_start
from pipeline.run_folder.status import SUMMARY
from pipeline.training.attempt import alone_in, on_record, record_verdict
from pipeline.training.batches import TrainingBatches
from pipeline.training.building import build_model
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.diagnostics import make_probe
from pipeline.training.engine import Engine
from pipeline.training.gate import check_preservation
from pipeline.training.inputs import (
    Inputs,
    check_model,
    open_fitting_base,
    open_fitting_tokenizer,
    open_layout,
    open_samples,
)
from pipeline.training.instruments import instruments_of
from pipeline.training.launch import collective_timeout, wait_at_most
from pipeline.training.loop import Outcome, train
from pipeline.training.metrics import Metrics
from pipeline.training.phases import Phases
from pipeline.training.preflight.check import check_allocation
from pipeline.training.profiler import Profiler
from pipeline.training.progress import Progress
from pipeline.training.signals import StopSignals
from pipeline.training.trainer import Trainer
from pipeline.training.unison import from_first_rank, in_unison
from pipeline.training.validation import Validation
from pipeline.training.watchdog import Watchdog

STACKS = "stacks"
"""The folder in which the ranks of a run that was given up leave their threads' stacks."""
_logger = log.get_logger(__name__)


def run_training(config_path: Path, device: torch.device) -> int:
    """Trains the run that `config_path` describes; every rank must call it. Returns the exit code.

    Raises:
        UserError: on the first rank that met it; the others leave without a word.
    """
    phases = Phases(device)
    with StopSignals() as signals:
        config = in_unison(lambda: load_config(config_path))
        wait_at_most(collective_timeout(config.watchdog))
        with alone_in(config.folder):
            return on_record(config.folder, phases, lambda: attempt(config, device, phases, signals))


def attempt(config: RunConfig, device: torch.device, phases: Phases, signals: StopSignals) -> int:
    """Trains until the end or a signal, and returns the exit code."""
    inputs = read_inputs(config)
    if from_first_rank(lambda: is_finished(config, inputs.base)):
        return FINISHED
    with Watchdog(config.watchdog, phases, config.folder / STACKS, partial(record_verdict, config.folder, phases)):
        trainer, position, difference = prepare(inputs, device, phases)
        if dist.get_rank() == 0:
            record_start(config, dist.get_world_size(), position.step)
        try:
            outcome = train(trainer, position, signals)
        except (UserError, SystemExit):
            trainer.checkpoints.finish()  # the next attempt shall find the one that is being written
            raise
        trainer.progress.close()
        trainer.metrics.close()
        trainer.profiler.close()
        if not outcome.finished:
            _logger.info("stopped by a signal at step %d; the same command goes on from there", outcome.position.step)
            return RESUME_LATER
        summarise(trainer, outcome, difference)
        return FINISHED


def read_inputs(config: RunConfig) -> Inputs:
    """Opens and checks everything that the run reads, except for the weights themselves; every rank must call it."""
    layout, deepspeed_config = in_unison(lambda: open_layout(config, dist.get_world_size()))
    base = in_unison(lambda: open_fitting_base(config))
    # On one rank: large tokenizers take seconds to build, and on a shared node all would at once.
    fingerprint = from_first_rank(lambda: open_fitting_tokenizer(config, base.spec).fingerprint)
    samples = in_unison(lambda: open_samples(config, fingerprint))
    return Inputs(config, deepspeed_config, layout, base, fingerprint, *samples)


def is_finished(config: RunConfig, base: BaseFolder) -> bool:
    """Whether an earlier attempt came to the end; says so if it did.

    Raises:
        CheckpointError: it did, but with another base or method than the configuration now has.
    """
    found = candidates(config.folder / "checkpoints") if (config.folder / SUMMARY).exists() else []
    if not found:
        return False
    checkpoint = found[0]
    try:
        manifest = load_manifest(checkpoint)
    except DamagedCheckpointError:
        return False  # resuming will say so, and take the one before
    if manifest.position.step < config.schedule.steps:
        return False
    check_same_model(manifest, checkpoint, base.hashes(), config.method)
    _logger.info(
        "%s is already at step %d of %d: nothing to train", config.folder, manifest.position.step, config.schedule.steps
    )
    return True


def prepare(inputs: Inputs, device: torch.device, phases: Phases) -> tuple[Trainer, Position, float | None]:
    """Everything the loop drives, where it begins, and how far the widened model was from its base before any step."""
    config, layout, rank = inputs.config, inputs.layout, dist.get_rank()
    timeout = collective_timeout(config.watchdog)
    groups = ProcessGroups(layout, timeout, sequence_parallel=config.parallel.sequence_parallel)
    check_allocation(config, inputs.deepspeed_config, inputs.base, groups, device)
    torch.manual_seed(config.seed)
    base = with_shared_hashes(inputs.base)
    model = load_model(inputs, base, groups)
    run = describe_run(config, base, model, inputs.tokenizer_fingerprint)
    engine = Engine(model, config, inputs.deepspeed_config, groups)
    batches = TrainingBatches(inputs.training, config, layout, rank, device)
    # Before the checkpoint is read: it also tells whether base and expansion arrived as they were.
    probe = next(batches.of_step(0))
    difference = check_preservation(engine, probe, config)

    folder = config.folder / "checkpoints"
    layout_record = describe_layout(layout, inputs.deepspeed_config.zero_stage, inputs.deepspeed_config.dtype)
    checkpoints = Checkpoints(
        folder,
        run,
        layout_record,
        keep_last=config.checkpoints.keep_last,
        keep_every_steps=config.checkpoints.keep_every_steps,
        asynchronous=config.checkpoints.asynchronous,
        timeout=timeout,
    )
    position = checkpoints.resume(engine) or Position()
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
        Progress(position.step, config.schedule.steps, config.metrics.log_every_s, visible=rank == 0),
        phases,
        instruments_of(inputs, device, phases),
        Profiler(config.profile, config.folder, rank, device),
    )
    return trainer, position, difference


def with_shared_hashes(base: BaseFolder) -> BaseFolder:
    """`base`, knowing its hashes: the ranks share the reading, and tell each other."""
    own = in_unison(lambda: {file.name: file_hash(file) for file in base.files[_own_share()]})
    parts = [own] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return replace(base, known_hashes=dict(sorted((name, digest) for part in parts for name, digest in part.items())))


def _own_share() -> slice:
    """This rank's share of a list that every rank has."""
    return slice(dist.get_rank(), None, dist.get_world_size())


def load_model(inputs: Inputs, base: BaseFolder, groups: ProcessGroups) -> Decoder:
    """The model before its first step; each rank reads no more than it will hold."""
    config, tp = inputs.config, groups.tensor_parallel
    started = time.perf_counter()
    in_unison(lambda: check_model(config, base.spec, tp))
    in_unison(lambda: methods.check_files(config, _own_share()))
    model = build_model(config, base, inputs.deepspeed_config, groups)
    in_unison(lambda: methods.load_initial_weights(model, config, base, tp))
    _logger.info("loaded %s in %.1f s", base.path, time.perf_counter() - started)
    return model


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
        "validation": {name: score.figures() for name, score in outcome.scores.items()},
        "checkpoint": str(checkpoint),
        "tensorboard": str(config.folder / "tensorboard"),
    }
    write_json(config.folder / SUMMARY, values)
    for name, score in outcome.scores.items():
        _logger.info("%s: perplexity %.3f, %.4f bits per byte", name, score.perplexity, score.bits_per_byte)
    _logger.info("trained %d steps; wrote %s", outcome.position.step, config.folder / SUMMARY)
