"""One attempt at a training run: read, build, train, save; it resumes where an earlier attempt stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.checkpoint.folder import latest_checkpoint, remove_unfinished
from pipeline.checkpoint.manifest import Position, describe_layout, describe_run
from pipeline.checks.door import check_allocation, read_inputs
from pipeline.checks.inputs import Inputs
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import FINISHED, RESUME_LATER, UserError, exit_code_of, in_one_line
from pipeline.files import file_hash, write_json
from pipeline.health.liveness import Phases, Verdict
from pipeline.health.watchdog import Watchdog, lost_a_peer
from pipeline.model.decoder import Decoder
from pipeline.parallel.ranks import all_gathered, broadcast_from_rank0, run_on_all_ranks
from pipeline.parallel.topology import ProcessGroups
from pipeline.run_folder.attempts import record_end, record_start
from pipeline.run_folder.lock import RunLock
from pipeline.run_folder.status import TRAINING
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpointing import Checkpoints
from pipeline.training.engine import Engine, build_model
from pipeline.training.launch import StopSignals, extend_collectives, use_deterministic_kernels
from pipeline.training.loop import Outcome, Trainer, train
from pipeline.training.observer import ObserverFactory, Observers, RunContext
from pipeline.training.validation import Validation, check_preservation

STACKS = "stacks"
"""The folder, in the run folder, of the stack traces that the watchdog writes when it ends a run."""
_logger = log.get_logger(__name__)


def run_training(
    config_path: Path, device: torch.device, make_observers: ObserverFactory, changes: Sequence[str] = ()
) -> int:
    """Trains the run that `config_path` and `changes` describe; every rank must call it. Returns the exit code.

    Raises:
        UserError: on the rank that found the fault, or rank 0; SystemExit on the others.
    """
    phases = Phases(device)
    with StopSignals() as signals, ExitStack() as lock:
        config = broadcast_from_rank0(lambda: load_config(config_path, changes))
        extend_collectives(config.watchdog)  # before rank 0 reads files, which may take long
        if config.deterministic:
            use_deterministic_kernels()

        def lock_and_read() -> Inputs:
            lock.enter_context(RunLock(config.folder))
            with _faults_on_record(config.folder, phases):
                return read_inputs(config, dist.get_world_size())

        inputs = broadcast_from_rank0(lock_and_read)
        if not inputs.finished:
            return attempt(inputs, device, phases, signals, make_observers)
        if dist.get_rank() == 0:
            record_end(config.folder, exit_code=FINISHED)
        return FINISHED


@contextmanager
def _faults_on_record(folder: Path, phases: Phases) -> Iterator[None]:
    """Records in `folder` the fault that ends the block. What follows from another rank's fault is not: a SystemExit,
    and a broken connection, which the watchdog records with the name of that rank."""
    try:
        yield
    except Exception as error:
        if not lost_a_peer(error):
            record_end(folder, exit_code=exit_code_of(error), step=phases.state.step, error=in_one_line(error))
        raise


def attempt(
    inputs: Inputs, device: torch.device, phases: Phases, signals: StopSignals, make_observers: ObserverFactory
) -> int:
    """Trains until the end or a signal, and returns the exit code.

    The end is on record before observers end, because a tracker may wait for its service; the watchdog then lets all
    ranks end together, because a launcher kills those that end long after the first.
    """
    config = inputs.config

    def record_verdict(verdict: Verdict) -> None:
        record_end(config.folder, exit_code=verdict.exit_code, step=phases.state.step, error=verdict.text)

    with ExitStack() as ending:
        with _faults_on_record(config.folder, phases):
            ending.enter_context(Watchdog(config.watchdog, phases, config.folder / STACKS, record_verdict))
            trainer, position, difference = prepare(inputs, device, phases, make_observers)
            finished = False

            def end_observers(kind: object, error: BaseException | None, trace: object) -> None:
                # Not after a fault of the program, or of another rank: an observer might wait for it.
                if error is None or isinstance(error, (UserError, SystemExit)):
                    trainer.observers.on_end(finished=finished)

            ending.push(end_observers)
            broadcast_from_rank0(partial(_record_start, config, position))
            try:
                outcome = train(trainer, position, signals)
            except (UserError, SystemExit):
                trainer.checkpoints.finish()  # the next attempt should find the checkpoint that is being written
                raise
            finally:
                trainer.batches.close()
            if outcome.finished:
                summarise(trainer, outcome, difference)
                finished = True
        code = FINISHED if outcome.finished else RESUME_LATER
        if dist.get_rank() == 0:
            record_end(config.folder, exit_code=code, step=phases.state.step)
    if not outcome.finished:
        _logger.info("stopped by a signal at step %d; the same command resumes from there", outcome.position.step)
    return code


def _record_start(config: RunConfig, position: Position) -> None:
    """Puts the start on record, and removes the mark of an end that more steps were added to."""
    (config.folder / TRAINING).unlink(missing_ok=True)
    record_start(config, dist.get_world_size(), position.step)


def prepare(
    inputs: Inputs, device: torch.device, phases: Phases, make_observers: ObserverFactory
) -> tuple[Trainer, Position, float | None]:
    """The trainer, the position it starts from, and the step-0 gate's difference (None where the gate does not apply).

    Every rank must call it.
    """
    config, layout, rank = inputs.config, inputs.layout, dist.get_rank()
    timeout = extend_collectives(config.watchdog)
    groups = ProcessGroups(layout, timeout, sequence_parallel=config.parallel.sequence_parallel)
    check_allocation(inputs, groups, device)
    torch.manual_seed(config.seed)
    hash_base(inputs)
    model = load_model(inputs, groups, device)
    run = describe_run(config, inputs.base, model, inputs.tokenizer_fingerprint)
    engine = Engine(model, config, inputs.deepspeed_config, groups)
    batches = TrainingBatches(inputs.samples.training, config, layout, rank, device)
    # Before the checkpoint is read: the gate also detects a base or an expansion that was damaged in a copy.
    probe = next(batches.of_step(0))
    gated = engine.model.keeps_base and inputs.starts_at_base
    difference = check_preservation(engine, probe, config) if gated else None

    checkpoints = Checkpoints(
        config.checkpoint_folder,
        run,
        describe_layout(layout, inputs.deepspeed_config.zero_stage, inputs.deepspeed_config.dtype),
        config.checkpoints,
        timeout,
    )
    validation = Validation(inputs, rank, device)
    position = checkpoints.resume(engine)
    if position is None:
        position = Position()
    if rank == 0:
        remove_unfinished(checkpoints.folder)
    context = RunContext(inputs, engine, probe, position, phases, device, rank)
    observers = Observers(make_observers(context))
    return Trainer(config, engine, batches, validation, checkpoints, observers, phases), position, difference


def hash_base(inputs: Inputs) -> None:
    """Hashes the files of the base and of the initial expansion, divided among the ranks."""
    base, own_share = inputs.base, slice(dist.get_rank(), None, dist.get_world_size())

    def read() -> dict[str, str]:
        if (expansion := inputs.method.expansion) is not None:
            expansion.check_files(own_share)
        return {file.name: file_hash(file) for file in base.files[own_share]}

    base.know_hashes({name: digest for part in all_gathered(run_on_all_ranks(read)) for name, digest in part.items()})


def load_model(inputs: Inputs, groups: ProcessGroups, device: torch.device) -> Decoder:
    """The model before its first step; each rank reads only what it will hold."""
    started = time.perf_counter()
    config, base = inputs.config, inputs.base
    model = build_model(config, base, inputs.deepspeed_config, groups, device)
    run_on_all_ranks(partial(inputs.method.load, model, base, groups.tensor_parallel))
    _logger.info("loaded %s in %.1f s", base.path, time.perf_counter() - started)
    return model


def summarise(trainer: Trainer, outcome: Outcome, difference: float | None) -> None:
    """Writes the run's figures to training.json, whose presence marks the run as finished."""
    engine, folder = trainer.engine, trainer.config.folder
    optimizer_state_elements = engine.optimizer_state_elements()
    if dist.get_rank() != 0:
        return
    values = {
        "step0_max_abs_logit_difference": difference,
        "trainable_parameters": engine.trainable_parameters,
        "total_parameters": engine.total_parameters,
        "optimizer_state_elements": optimizer_state_elements,
        "steps": outcome.position.step,
        "tokens_seen": outcome.position.tokens_seen,
        "seconds": round(outcome.position.seconds, 3),
        "validation": {name: score.figures() for name, score in outcome.scores.items()},
        "checkpoint": str(latest_checkpoint(trainer.checkpoints.folder)),
        "tensorboard": str(folder / "tensorboard"),
    }
    write_json(folder / TRAINING, values)
    for name, score in outcome.scores.items():
        message = (
            "%s: perplexity %.3f, %.4f bits per byte, of packed sequences (scale-cpt evaluate scores whole documents)"
        )
        _logger.info(message, name, score.perplexity, score.bits_per_byte)
    _logger.info("trained %d steps; wrote %s", outcome.position.step, folder / TRAINING)
