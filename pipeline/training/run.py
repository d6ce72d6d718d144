"""One training run, from its configuration to its summary; it goes on where an earlier attempt stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline import log, methods
from pipeline.checkpoint.folder import candidates, latest_checkpoint, remove_unfinished
from pipeline.checkpoint.manifest import Position, check_same_model, describe_layout, describe_run, load_manifest
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import FINISHED, RESUME_LATER, DamagedCheckpointError, UserError, exit_code_of, in_one_line
from pipeline.files import file_hash, write_json
from pipeline.health.liveness import Phases, Verdict
from pipeline.health.preflight import check_allocation
from pipeline.health.watchdog import Watchdog
from pipeline.inputs import Inputs, check_model, open_fitting_base, open_fitting_tokenizer, open_layout, open_samples
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.parallel.ranks import broadcast_from_rank0, run_on_all_ranks
from pipeline.parallel.topology import ProcessGroups
from pipeline.run_folder.attempts import record_end, record_start
from pipeline.run_folder.lock import RunLock
from pipeline.run_folder.status import TRAINING
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpointing import Checkpoints
from pipeline.training.engine import Engine, build_model
from pipeline.training.launch import StopSignals, collective_timeout, wait_at_most
from pipeline.training.loop import Outcome, Trainer, train
from pipeline.training.observer import ObserverFactory, Observers, RunContext
from pipeline.training.validation import Validation, check_preservation

# --- One attempt at a run: alone in its folder, and on record there, however it ends --------------------------------


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other job works in `folder` during the block; every rank must enter it.

    Raises:
        FolderTakenError: another one does.
    """
    lock = RunLock(folder)  # the first rank's holds it for all
    broadcast_from_rank0(lambda: lock.__enter__() and None)
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            lock.__exit__(None, None, None)


def on_record(folder: Path, phases: Phases, work: Callable[[], int]) -> int:
    """Calls `work`, notes in `folder` how it ended, and returns its exit code.

    A fault is noted by the rank that met it. Those that only heard of it leave by SystemExit.
    """
    try:
        code = work()
    except Exception as error:
        record_end(
            folder,
            exit_code=exit_code_of(error),
            step=phases.state.step,
            error=in_one_line(error),
        )
        raise
    if dist.get_rank() == 0:
        record_end(folder, exit_code=code, step=phases.state.step)
    return code


def record_verdict(folder: Path, phases: Phases, verdict: Verdict) -> None:
    """Notes in `folder` why the ranks gave up."""
    record_end(folder, exit_code=verdict.exit_code, step=phases.state.step, error=verdict.text)


# --- One training run, from its configuration to its summary; it  ---

STACKS = "stacks"
"""The folder in which the ranks of a run that was given up leave their threads' stacks."""
_logger = log.get_logger(__name__)


def run_training(config_path: Path, device: torch.device, make_observers: ObserverFactory) -> int:
    """Trains the run that `config_path` describes; every rank must call it. Returns the exit code.

    Raises:
        UserError: on the first rank that met it; the others leave without a word.
    """
    phases = Phases(device)
    with StopSignals() as signals:
        config = run_on_all_ranks(lambda: load_config(config_path))
        wait_at_most(collective_timeout(config.watchdog))
        with alone_in(config.folder):
            return on_record(config.folder, phases, lambda: attempt(config, device, phases, signals, make_observers))


def attempt(
    config: RunConfig, device: torch.device, phases: Phases, signals: StopSignals, make_observers: ObserverFactory
) -> int:
    """Trains until the end or a signal, and returns the exit code."""
    inputs = read_inputs(config)
    if broadcast_from_rank0(lambda: is_finished(config, inputs.base)):
        return FINISHED
    with Watchdog(config.watchdog, phases, config.folder / STACKS, partial(record_verdict, config.folder, phases)):
        trainer, position, difference = prepare(inputs, device, phases, make_observers)
        if dist.get_rank() == 0:
            record_start(config, dist.get_world_size(), position.step)
        try:
            outcome = train(trainer, position, signals)
        except (UserError, SystemExit):
            trainer.checkpoints.finish()  # the next attempt shall find the one that is being written
            trainer.observers.on_end(finished=False)
            raise
        trainer.observers.on_end(finished=outcome.finished)
        if not outcome.finished:
            _logger.info("stopped by a signal at step %d; the same command goes on from there", outcome.position.step)
            return RESUME_LATER
        summarise(trainer, outcome, difference)
        return FINISHED


def read_inputs(config: RunConfig) -> Inputs:
    """Opens and checks everything that the run reads, except for the weights themselves; every rank must call it."""
    layout, deepspeed_config = run_on_all_ranks(lambda: open_layout(config, dist.get_world_size()))
    base = run_on_all_ranks(lambda: open_fitting_base(config))
    # On one rank: large tokenizers take seconds to build, and on a shared node all would at once.
    fingerprint = broadcast_from_rank0(lambda: open_fitting_tokenizer(config, base.spec).fingerprint)
    samples = run_on_all_ranks(lambda: open_samples(config, fingerprint))
    return Inputs(config, deepspeed_config, layout, base, fingerprint, *samples)


def is_finished(config: RunConfig, base: BaseFolder) -> bool:
    """Whether an earlier attempt came to the end; says so if it did.

    Raises:
        CheckpointError: it did, but with another base or method than the configuration now has.
    """
    found = candidates(config.folder / "checkpoints") if (config.folder / TRAINING).exists() else []
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


def prepare(
    inputs: Inputs, device: torch.device, phases: Phases, make_observers: ObserverFactory
) -> tuple[Trainer, Position, float | None]:
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
        checkpoints,
        Observers(make_observers(RunContext(inputs, engine, probe, position, phases, device, rank))),
        phases,
    )
    return trainer, position, difference


def with_shared_hashes(base: BaseFolder) -> BaseFolder:
    """`base`, knowing its hashes: the ranks share the reading, and tell each other."""
    own = run_on_all_ranks(lambda: {file.name: file_hash(file) for file in base.files[_own_share()]})
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
    run_on_all_ranks(lambda: check_model(config, base.spec, tp))
    run_on_all_ranks(lambda: methods.check_files(config, _own_share()))
    model = build_model(config, base, inputs.deepspeed_config, groups)
    run_on_all_ranks(lambda: methods.load_initial_weights(model, config, base, tp))
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
    write_json(config.folder / TRAINING, values)
    for name, score in outcome.scores.items():
        _logger.info("%s: perplexity %.3f, %.4f bits per byte", name, score.perplexity, score.bits_per_byte)
    _logger.info("trained %d steps; wrote %s", outcome.position.step, config.folder / TRAINING)
