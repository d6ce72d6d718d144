"""One attempt at a training run, which resumes where an earlier attempt stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.checks.checklist import check_stage
from pipeline.checks.inputs import RunInputs
from pipeline.config.run import load_config
from pipeline.errors import (
    FINISHED,
    INTERRUPTED,
    RESUME_LATER,
    UserError,
    exit_code_of,
    in_one_line,
)
from pipeline.files.json_files import write_json
from pipeline.health.liveness import INTERRUPTION, Verdict
from pipeline.health.phases import Phases
from pipeline.health.watchdog import RankWatchdog, lost_a_peer
from pipeline.model.bases import kind_of
from pipeline.model.flash_attention import activate_flash_attention
from pipeline.parallel.ranks import broadcast_from_rank0, run_on_all_ranks
from pipeline.run_folder.attempts import record_end, record_training
from pipeline.run_folder.lock import RunLock
from pipeline.run_folder.status import TRAINING_FILE
from pipeline.training.deepspeed_internals.lifecycle import check_config
from pipeline.training.launch import StopSignals, extend_collectives, use_deterministic_kernels
from pipeline.training.trainer import ObserverFactory, Trainer

STACKS = "stacks"
"""The folder, in the run folder, of the stacks that the watchdog writes when it ends a run."""
_logger = log.get_logger(__name__)


def run_training(
    config_path: Path,
    device: torch.device,
    make_observers: ObserverFactory,
    changes: Sequence[str] = (),
) -> int:
    """Trains the run that `config_path` and `changes` describe; returns the exit code.

    Every rank must call it.
    """
    phases = Phases(device)
    with StopSignals() as signals, ExitStack() as lock:
        config = broadcast_from_rank0(lambda: load_config(config_path, changes))
        extend_collectives(config.watchdog)  # before rank 0 reads files, which may take long
        if config.deterministic:
            use_deterministic_kernels()

        def lock_and_read() -> RunInputs:
            lock.enter_context(RunLock(config.folder))
            with _faults_on_record(config.folder, phases):
                opened = check_stage(config, dist.get_world_size(), "train")
                check_config(config, opened.deepspeed_config, opened.layout)
                return opened

        inputs = broadcast_from_rank0(lock_and_read)
        if not inputs.finished:
            if device.type == "cuda":
                _choose_kernels(inputs, folder=config.folder, phases=phases)
            return attempt(inputs, device, phases, signals, make_observers)
        if dist.get_rank() == 0:
            record_end(config.folder, exit_code=FINISHED)
        return FINISHED


def _choose_kernels(inputs: RunInputs, folder: Path, phases: Phases) -> None:
    """Gives torch's dispatcher the kernels of attention that rank 0 has chosen for all ranks.

    Raises:
        MissingPackageError: a rank cannot load them.
    """
    chosen = inputs.flash_attention
    if dist.get_rank() == 0:
        _logger.info("attention: %s", chosen.text)
    if chosen.fa4:
        with _faults_on_record(folder, phases):
            run_on_all_ranks(activate_flash_attention)


@contextmanager
def _faults_on_record(folder: Path, phases: Phases) -> Iterator[None]:
    """Records in `folder` the fault that ends the block.

    What follows from another rank's fault is not recorded here: a SystemExit, and a broken
    connection, which the watchdog records with the name of that rank.

    Raises:
        KeyboardInterrupt: Ctrl-C, once rank 0 has it on record.
    """
    try:
        yield
    except Exception as error:
        if not lost_a_peer(error):
            record_end(
                folder,
                exit_code=exit_code_of(error),
                step=phases.state.step,
                error=in_one_line(error),
            )
        raise
    except KeyboardInterrupt:
        if dist.get_rank() == 0:  # every rank gets the signal: one record is enough
            record_end(
                folder, exit_code=INTERRUPTED, step=phases.state.step, error=INTERRUPTION.text
            )
        raise


def attempt(
    inputs: RunInputs,
    device: torch.device,
    phases: Phases,
    signals: StopSignals,
    make_observers: ObserverFactory,
) -> int:
    """Trains until the end or a signal; returns the exit code.

    The end is on record before the observers end, because a tracker may wait for its service. The
    watchdog then lets all ranks end together, because a launcher kills those that end long after
    the first.

    Raises:
        UserError: training failed; see `Trainer`.
        SystemExit: another rank failed.
    """
    config = inputs.config

    def record_verdict(verdict: Verdict) -> None:
        record_end(
            config.folder, exit_code=verdict.exit_code, step=phases.state.step, error=verdict.text
        )

    with ExitStack() as ending:
        with _faults_on_record(config.folder, phases):
            stacks = config.folder / STACKS
            watchdog = RankWatchdog(
                config.watchdog, phases, stacks, record_verdict, signals.is_insistent
            )
            ending.enter_context(watchdog)
            trainer = Trainer(inputs, device, phases, make_observers)

            def end_observers(kind: object, error: BaseException | None, trace: object) -> None:
                # Not after a fault of the program, or of another rank: an observer might wait for
                # it.
                if error is None or isinstance(error, (UserError, SystemExit)):
                    for observer in trainer.observers:
                        observer.on_end(finished=trainer.finished)

            # Pushed after the watchdog: an exit stack ends the last first, so the observers end
            # while the watchdog still watches.
            ending.push(end_observers)
            broadcast_from_rank0(partial(_record_start, trainer))
            try:
                trainer.train(signals)
            except (UserError, SystemExit):
                # The next attempt should find the checkpoint that is being written.
                trainer.checkpoints.finish()
                raise
            finally:
                trainer.batches.close()
            if trainer.finished and trainer.rank == 0:
                summarise(trainer)
        code = FINISHED if trainer.finished else RESUME_LATER
        if dist.get_rank() == 0:
            record_end(config.folder, exit_code=code, step=phases.state.step)
    if not trainer.finished:
        _logger.info(
            "stopped by a signal at step %d; the same command resumes from there",
            trainer.position.step,
        )
    return code


def _record_start(trainer: Trainer) -> None:
    """On rank 0: records the start, and removes the mark of a run that more steps were added to."""
    (trainer.config.folder / TRAINING_FILE).unlink(missing_ok=True)
    record_training(trainer.config, dist.get_world_size(), trainer.position.step)
    spec = trainer.inputs.spec
    slow = kind_of(spec).missing_kernels(spec)
    if slow is not None:
        _logger.warning("%s", slow)


def summarise(trainer: Trainer) -> None:
    """Writes the run's figures to training.json, whose presence marks the run as finished."""
    position = trainer.position
    path = trainer.config.folder / TRAINING_FILE
    validation = {name: score.figures() for name, score in trainer.scores.items()}
    values = {
        "step0_max_abs_logit_difference": trainer.step0_difference,
        "trainable_parameters": trainer.engine.trainable_parameters,
        "total_parameters": trainer.engine.total_parameters,
        "steps": position.step,
        "tokens_seen": position.tokens_seen,
        "seconds": round(position.seconds, 3),
        "validation": validation,
    }
    write_json(path, values)
    for name, score in trainer.scores.items():
        _logger.info(
            "%s: perplexity %.3f, %.4f bits per byte, of packed sequences (scale-cpt evaluate "
            "scores whole documents)",
            name,
            score.perplexity,
            score.bits_per_byte,
        )
    if trainer.config.gate is not None and trainer.scores:
        _logger.info("these figures are without the gate, which scale-cpt gate fits next")
    _logger.info("trained %d steps; wrote %s", position.step, path)
