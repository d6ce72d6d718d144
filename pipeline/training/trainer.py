"""The trainer of a run: its parts, its loop of steps, validations and checkpoints, and the rollback after a spike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import log
from pipeline.checkpoint.folder import remove_unfinished
from pipeline.checkpoint.manifest import Position, StepRecord, describe_layout, describe_run
from pipeline.checks.checklist import check_allocation
from pipeline.checks.inputs import RunInputs
from pipeline.config.schedule import learning_rate
from pipeline.data.dataset.packing import IGNORED
from pipeline.errors import UserError
from pipeline.files import file_hash
from pipeline.health.liveness import Phases
from pipeline.model.chunked_loss import Losses
from pipeline.model.decoder import Decoder
from pipeline.parallel.ranks import (
    all_gathered,
    raise_on_all_ranks,
    run_on_all_ranks,
    summed,
    warn_on_rank0,
)
from pipeline.parallel.topology import ProcessGroups
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpointing import Checkpoints
from pipeline.training.divergence import check_skipped_steps, end_diverged, find_spike, remembered
from pipeline.training.engine import Engine, build_model
from pipeline.training.launch import StopSignals, extend_collectives
from pipeline.training.observer import Observer, StepEvent, ValidationEvent
from pipeline.training.validation import HeldoutScore, Validation, check_preservation

ATTEMPTS = 2
"""How often a step is computed at most: a transient hardware fault is gone the second time, a fault in the data not."""
_logger = log.get_logger(__name__)


class Trainer:
    """A run that is about to start or to resume; every rank makes it and calls its methods."""

    def __init__(
        self,
        inputs: RunInputs,
        device: torch.device,
        phases: Phases,
        make_observers: ObserverFactory,
    ) -> None:
        """Checks the allocation, loads the model and the newest checkpoint."""
        config, layout = inputs.config, inputs.layout
        self.inputs, self.config, self.device, self.phases, self.rank = (
            inputs,
            config,
            device,
            phases,
            dist.get_rank(),
        )
        self.tokens_per_step = config.schedule.global_batch_size * config.data.sequence_length
        timeout = extend_collectives(config.watchdog)
        groups = ProcessGroups(layout, timeout, sequence_parallel=config.parallel.sequence_parallel)
        check_allocation(inputs, groups, device)
        torch.manual_seed(config.seed)
        hash_base(inputs)
        model = load_model(inputs, groups, device)
        contents = inputs.samples.contents
        run = describe_run(config, inputs.base, model, inputs.tokenizer_fingerprint, contents)
        self.engine = Engine(model, config, inputs.deepspeed_config, groups)
        self.batches = TrainingBatches(inputs.samples.training, config, layout, self.rank, device)
        self.validation = Validation(inputs, self.rank, device)
        # Before the checkpoint is read: the gate also detects a base or an expansion that was damaged in a copy.
        self.step0_difference: float | None = None
        if self.engine.model.keeps_base and inputs.starts_at_base:
            probe = next(self.batches.of_step(0))
            self.step0_difference = check_preservation(self.engine, probe, config)

        written_at = describe_layout(
            layout, inputs.deepspeed_config.zero_stage, inputs.deepspeed_config.dtype
        )
        self.checkpoints = Checkpoints(
            config.checkpoint_folder,
            run,
            written_at,
            config.checkpoints,
            timeout,
            config.stability.rollback_steps,
        )
        self.position = self.checkpoints.resume(self.engine) or Position()
        if self.rank == 0:
            remove_unfinished(self.checkpoints.folder)
        self.scores: dict[str, HeldoutScore] = {}  # of the last validation
        self.finished = False  # whether the last step is done and saved
        self.observers = list(make_observers(self))

    def train(self, signals: StopSignals) -> None:
        """Trains to the last step, or to the step during which a signal came, which it then saves.

        Where training diverged or forgot too much, or the last save failed, rank 0 raises a UserError.
        """
        config, phases, checkpoints = self.config, self.phases, self.checkpoints
        phases.finished(self.position.step)
        self._validate_ends()
        while self.position.step < config.schedule.steps:
            event, stop = self.take_step(signals)
            phases.finished(event.step)
            check_skipped_steps(config, self.position)
            if spike := find_spike(
                self.position.recent, config.stability, config.schedule.gradient_clipping
            ):
                with phases("checkpoint"):
                    self._roll_back(spike)
                continue

            last, forgot = event.step == config.schedule.steps, None
            if last or event.step % config.validation.every_steps == 0:
                with phases("validation"):
                    forgot = self._validate(event)
            if checkpoints.failed_saves:
                event.figures["failed_saves"] = checkpoints.failed_saves
            for observer in self.observers:
                observer.on_step(event)

            leaving = last or stop or forgot is not None
            if leaving or event.step % config.checkpoints.every_steps == 0:
                with phases("checkpoint"):
                    checkpoints.save(self.engine, self.position, last=leaving)
            if forgot is not None and not last:
                raise_on_all_ranks(forgot)
            if stop and not last:
                return
        self.finished = True

    def take_step(self, signals: StopSignals) -> tuple[StepEvent, bool]:
        """Takes the next step; returns what observers are told of it, and whether any rank was asked to stop.

        A step whose loss or gradient is not finite is computed once more, then skipped.
        """
        before, number, stop = self.position, self.position.step + 1, False
        event = StepEvent(number, self.tokens_per_step, None, {})
        self.position = before.changed(step=number, tokens_seen=number * self.tokens_per_step)
        if number not in before.skipped_steps:
            started = time.perf_counter()
            rate = learning_rate(before.step, self.config.schedule) * before.learning_rate_factor
            for attempt in range(ATTEMPTS):
                totals = self._compute(before.step, rate, stop=signals.received is not None)
                stop, seconds = totals.stop, time.perf_counter() - started
                self.position = self.position.changed(seconds=before.seconds + seconds)
                if totals.applied:
                    event.seconds = seconds
                    self._record(event, totals, rate, recomputed=attempt > 0)
                    return event, stop
                warn_on_rank0(
                    _logger,
                    "step %d: its loss or gradient is not finite; no weight was changed",
                    number,
                )
            self.position = self.position.skipping(number)
        warn_on_rank0(_logger, "step %d: skipped; no weight was changed", number)
        event.figures["skipped_steps"] = sum(step <= number for step in self.position.skipped_steps)
        if self.position.rollbacks:
            event.figures["rollbacks"] = self.position.rollbacks
        return event, stop

    def _compute(self, index: int, rate: float, *, stop: bool) -> StepTotals:
        """Computes the step after `index` steps once; it changes the weights if the gradient is finite."""
        phases, sums, batches = self.phases, StepSums(self.device), self.batches.of_step(index)
        while True:
            with phases("data"):
                batch = next(batches, None)
            if batch is None:
                break
            with phases("forward"):
                losses = self.engine.loss(batch)
            with phases("backward"):
                self.engine.backward(losses.total)
            with phases("step"):
                self.engine.step(rate)
            sums.add(losses, batch.targets, batch.kl_sequences)
        with phases("communication"):
            return sums.over_all_ranks(self.engine, stop=stop)

    def _record(
        self, event: StepEvent, totals: StepTotals, rate: float, *, recomputed: bool
    ) -> None:
        """Records a step that changed the weights: its figures in `event`, what later decisions need in `position`."""
        figures = event.figures
        if totals.nll_per_token is not None:  # a small batch may be rehearsed as a whole
            figures["loss"] = totals.nll_per_token
            record = StepRecord(event.step, totals.nll_per_token, totals.gradient_norm)
            recent = remembered(self.position.recent, record, self.config.stability)
            self.position = self.position.changed(recent=recent)
        figures |= {"learning_rate": rate, "gradient_norm": totals.gradient_norm}
        if totals.kl_per_token is not None:
            figures["kl_self_generated"] = totals.kl_per_token
        if self.engine.routed:
            figures["preserved_fraction"] = totals.preserved_fraction
        if recomputed:
            figures["recomputed_steps"] = count = self.position.recomputed_steps + 1
            self.position = self.position.changed(recomputed_steps=count)

    def _validate(self, event: StepEvent) -> UserError | None:
        """Scores the held-out parts after a step, whose `event` gets the figures; returns what ends the run, if any."""
        self.scores = self.validation.run(self.engine)
        validation = ValidationEvent(self.position, self.scores, score_figures(self.scores))
        for observer in self.observers:
            observer.on_validation(validation)
        self.position = validation.position
        event.figures |= validation.figures
        return validation.stop

    def _validate_ends(self) -> None:
        """Scores the model before its first step (the reference for forgetting), or where no step is left."""
        if 0 < self.position.step < self.config.schedule.steps:
            return
        with self.phases("validation"):
            self.scores = self.validation.run(self.engine)
        if self.position.step == 0:
            event = StepEvent(0, 0, None, score_figures(self.scores))
            for observer in self.observers:
                observer.on_step(event)
            initial = {name: score.nll_per_token for name, score in self.scores.items()}
            self.position = self.position.changed(initial_nll_per_token=initial)

    def _roll_back(self, spike: Sequence[StepRecord]) -> None:
        """Restores the newest checkpoint before `spike`, whose samples are then skipped; without one, ends the run."""
        config, position = self.config, self.position
        skipped = range(
            spike[0].step - 1, spike[-1].step + 1
        )  # also the step whose update began it
        found = f"steps {spike[0].step} to {spike[-1].step} are a spike (loss {spike[-1].loss:.4f})"
        if (count := position.rollbacks) >= config.stability.max_rollbacks:
            end_diverged(
                config,
                position,
                f"{found} after {count} rollbacks, as many as stability.max_rollbacks",
            )
        self.checkpoints.finish()
        earlier = self.checkpoints.resume(self.engine, before=skipped.start)
        if earlier is None:
            end_diverged(config, position, f"{found}, and no checkpoint lies before it")
        message = "%s; rolling back to step %d and skipping steps %d to %d"
        warn_on_rank0(_logger, message, found, earlier.step, skipped[0], skipped[-1])
        # The counts and the skipped steps are the whole run's; everything else is the checkpoint's.
        self.position = earlier.skipping(*position.skipped_steps, *skipped).changed(
            rollbacks=count + 1,
            recomputed_steps=position.recomputed_steps,
            seconds=position.seconds,
        )
        check_skipped_steps(config, self.position)
        self.checkpoints.record_rollback(self.position)
        for observer in self.observers:
            observer.on_rollback(self.position.step)


ObserverFactory = Callable[[Trainer], Iterable[Observer]]
"""Makes a run's observers on every rank; `pipeline.observers.make_observers` makes those of the configuration."""


def hash_base(inputs: RunInputs) -> None:
    """Hashes the files of the base and of the initial expansion, divided among the ranks."""
    base, own_share = inputs.base, slice(dist.get_rank(), None, dist.get_world_size())

    def read() -> dict[str, str]:
        if (expansion := inputs.method.expansion) is not None:
            expansion.check_files(own_share)
        return {file.name: file_hash(file) for file in base.files[own_share]}

    base.set_known_hashes(
        {
            name: digest
            for part in all_gathered(run_on_all_ranks(read))
            for name, digest in part.items()
        }
    )


def load_model(inputs: RunInputs, groups: ProcessGroups, device: torch.device) -> Decoder:
    """The model before its first step; each rank reads only what it will hold."""
    started = time.perf_counter()
    model = build_model(inputs.config, inputs.base, inputs.deepspeed_config, groups, device)
    run_on_all_ranks(partial(inputs.method.load, model, inputs.base, groups.tensor_parallel))
    _logger.info("loaded %s in %.1f s", inputs.base.path, time.perf_counter() - started)
    return model


def score_figures(scores: dict[str, HeldoutScore]) -> dict[str, float]:
    """The scores by their names in metrics.jsonl."""
    return {
        f"{figure}/{name}": value
        for name, score in scores.items()
        for figure, value in score.figures().items()
    }


class StepTotals(NamedTuple):
    """A step over all ranks."""

    nll_per_token: float | None
    """the mean over predicted tokens, without rehearsed ones; None without any"""
    kl_per_token: float | None
    """the mean KL(base || model) over rehearsed tokens; None without any"""
    preserved_fraction: float
    """the share of all these tokens that took Route's preserved path"""
    stop: bool
    """whether any rank was asked to stop"""
    gradient_norm: float
    """rank 0's global norm before clipping: every decision is made from the same number"""
    applied: bool
    """whether the weights changed"""


class StepSums:
    """Adds up a step's micro-batches on the device; one collective and one wait bring all ranks' sums together."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(8, dtype=torch.float64, device=device)

    def add(self, losses: Losses, targets: Tensor, kl_sequences: int) -> None:
        """Adds a micro-batch of targets [B, S], of which the first `kl_sequences` sequences are rehearsed."""
        predicted = targets != IGNORED
        self._sums[0] += losses.nll.sum()
        self._sums[1] += predicted[kl_sequences:].sum()
        self._sums[2] += losses.kl.sum()
        self._sums[3] += predicted[:kl_sequences].sum()
        self._sums[4] += (losses.preserved & predicted).sum()

    def over_all_ranks(self, engine: Engine, *, stop: bool) -> StepTotals:
        """The step's totals; every rank must call it, and all get the same result."""
        if engine.tensor_parallel.rank != 0:
            self._sums.zero_()  # tensor-parallel neighbours read the same tokens
        self._sums[5] = float(stop)
        if dist.get_rank() == 0:
            self._sums[6], self._sums[7] = engine.gradient_norm, engine.step_applied
        nll, predicted, kl, rehearsed, preserved, stops, norm, applied = summed(self._sums).tolist()
        return StepTotals(
            nll_per_token=nll / predicted if predicted else None,
            kl_per_token=kl / rehearsed if rehearsed else None,
            preserved_fraction=preserved / max(1.0, predicted + rehearsed),
            stop=stops > 0,
            gradient_norm=norm,
            applied=applied > 0,
        )
