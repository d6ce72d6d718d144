"""The trainer of a run: its loop of steps, validations and checkpoints, and the rollback."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.checkpoint.folder import remove_unfinished
from pipeline.checkpoint.manifest import describe_layout, describe_run
from pipeline.checkpoint.position import Position, StepRecord
from pipeline.checkpoint.rank_files import Index
from pipeline.checks.checklist import check_allocation
from pipeline.checks.inputs import RunInputs
from pipeline.config.stage_plan import TrainingStage, stage_after
from pipeline.errors import UserError
from pipeline.health.phases import Phases
from pipeline.parallel.ranks import (
    raise_on_all_ranks,
    warn_on_rank0,
)
from pipeline.parallel.topology import ProcessGroups
from pipeline.training.base_copies import hash_base
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpointing import CheckpointManager
from pipeline.training.divergence import check_skipped_steps, end_diverged, find_spike
from pipeline.training.engine import Engine
from pipeline.training.launch import StopSignals, extend_collectives
from pipeline.training.learning_rate import cooled_rate, learning_rate
from pipeline.training.load_model import load_model
from pipeline.training.observer import Observer, StepEvent, ValidationEvent
from pipeline.training.step_totals import StepSums, StepTotals
from pipeline.training.validation import HeldoutScore, Validator, check_preservation, score_figures

TRIES = 2
"""How often a step is computed at most.

A transient hardware fault is gone the second time, a fault in the data is not.
"""
_logger = log.get_logger(__name__)


class Trainer:
    """A run that is about to start or to resume; every rank makes it and calls its methods.

    Attributes:
        stages: the stages of the run, at least one.
        stage: the stage of the next step, which `engine` and `batches` are made for.
        position: where the run stands.
        scores: the scores of the last validation.
        finished: whether the last step is done and saved.
        step0_difference: the result of the preservation check; None if the run has none.
    """

    def __init__(
        self,
        inputs: RunInputs,
        device: torch.device,
        phases: Phases,
        make_observers: ObserverFactory,
    ) -> None:
        """Checks the allocation, then loads the model and the newest checkpoint."""
        config = inputs.config
        self.inputs = inputs
        self.config = config
        self.device = device
        self.phases = phases
        self.rank = dist.get_rank()
        # Before any group is made: a group keeps the timeout that it was made with.
        timeout = extend_collectives(config.watchdog)
        self.groups = ProcessGroups(
            inputs.layout,
            timeout,
            sequence_parallel=config.parallel.sequence_parallel,
            padded_experts=config.parallel.padded_experts,
        )
        check_allocation(inputs, self.groups, device)

        torch.manual_seed(config.seed)
        hash_base(inputs)
        self.stages = inputs.stages
        self._prepare(self.stages[0])
        run = describe_run(
            config,
            inputs.base,
            self.engine.model,
            inputs.tokenizer_fingerprint,
            inputs.samples.contents,
        )
        self.validator = Validator(inputs, self.rank, device)
        # Before the checkpoint is read, so that it also detects a base or an expansion that was
        # damaged in a copy.
        self.step0_difference: float | None = None
        if self.engine.model.keeps_base and inputs.starts_at_base:
            probe = next(self.batches.micro_batches(0))
            self.step0_difference = check_preservation(self.engine, probe, config)

        deepspeed_config = inputs.deepspeed_config
        self.checkpoints = CheckpointManager(
            config.checkpoint_folder,
            run,
            describe_layout(inputs.layout, deepspeed_config.zero_stage, deepspeed_config.dtype),
            config.checkpoints,
            timeout,
            config.stability.rollback_steps,
        )
        self.position = self.checkpoints.resume(self._engine_after) or Position()
        if self.rank == 0:
            remove_unfinished(self.checkpoints.folder)
        self.scores: dict[str, HeldoutScore] = {}
        self.finished = False
        self.observers = list(make_observers(self))

    def train(self, signals: StopSignals) -> None:
        """Trains to the last step, or to the step during which a signal came, which it then saves.

        Raises:
            UserError: on rank 0, where training diverged or forgot too much, or the last save
                failed. The other ranks raise SystemExit.
        """
        config = self.config
        self.phases.finished(self.position.step)
        self._validate_ends()
        # All ranks take the same branches: every decision follows from totals and scores that are
        # reduced over all ranks.
        while self.position.step < self.last_step:
            event, stop_requested = self.take_step(signals)
            self.phases.finished(event.step)
            check_skipped_steps(config, self.position)
            # From figures that are equal on all ranks, so that they all roll back, or none does.
            spike = find_spike(
                self.position.recent,
                config.stability,
                config.schedule.gradient_clipping,
                first_step=self.stage.first_step,
            )
            if spike:
                self._roll_back(spike)
                continue

            ends_stage = event.step == self.stage.end_step
            is_due = event.step % config.validation.every_steps == 0
            limit_error: UserError | None = None
            if is_due or ends_stage or event.step == self.last_step:
                limit_error = self._validate(event)
            # After the validation, which may end the run early.
            is_last = event.step == self.last_step
            self._report(event)

            is_leaving = is_last or stop_requested or limit_error is not None
            is_required = ends_stage or is_leaving
            if is_required or event.step % config.checkpoints.every_steps == 0:
                # After the validation, whose observers may change the position that is saved.
                with self.phases("checkpoint"):
                    self.checkpoints.save(self.engine, self.position, required=is_required)
            if limit_error is not None:
                raise_on_all_ranks(limit_error)
            if stop_requested and not is_last:
                return
            if ends_stage and not is_last:
                self._begin_next_stage()
        self.finished = True

    @property
    def last_step(self) -> int:
        """After how many steps the run ends, as far as is decided."""
        return self.position.last_step(self.config)

    def _prepare(self, stage: TrainingStage, checkpoint: Index | None = None) -> None:
        """Makes the engine and the batches of a stage; every rank must call it.

        The model has its values before the first step; what is frozen in this stage has those of
        the `checkpoint`.
        """
        self.stage = stage
        config = stage.config
        inputs = self.inputs
        model = load_model(inputs, config, self.groups, self.device)
        self.engine = Engine(
            model,
            config,
            inputs.deepspeed_config,
            self.groups,
            trained_before=stage.trained_before,
            checkpoint=checkpoint,
        )
        samples, first = inputs.samples.training[stage.number]
        self.batches = TrainingBatches(
            samples, config, inputs.layout, self.rank, self.device, first_sample=first
        )

    def _engine_after(self, step: int, checkpoint: Index) -> Engine:
        """The engine that trains the step after `step` steps; every rank must call it.

        If that step is of another stage, the engine is made anew. A stage boundary, a resume and
        a rollback all come here, so that they cannot differ.
        """
        stage = stage_after(self.stages, step)
        if stage.number == self.stage.number:
            return self.engine
        if self.rank == 0:
            message = "stage %d of %d: %s"
            _logger.info(message, stage.number + 1, len(self.stages), stage)
        # Freed first: two models, or two optimizers, may not fit.
        self.batches.close()
        self.engine.close()
        del self.engine
        gc.collect()  # DeepSpeed's objects refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._prepare(stage, checkpoint)
        return self.engine

    def _begin_next_stage(self) -> None:
        """Goes on from the checkpoint at the end of a stage, as a run that resumes does."""
        reached = self.position.step
        with self.phases("checkpoint"):
            position = self.checkpoints.resume(self._engine_after)
        assert position is not None, "the end of a stage was saved"
        self.position = position
        if position.step < reached:
            # The checkpoint there is damaged: steps are taken again, as after a rollback.
            message = "going back from step %d to step %d at a stage boundary"
            warn_on_rank0(_logger, message, reached, position.step)
            for observer in self.observers:
                observer.on_rollback(position.step)

    def take_step(self, signals: StopSignals) -> tuple[StepEvent, bool]:
        """Takes the next step.

        A step whose loss or gradient is not finite is computed once more, then skipped.

        Returns:
            What observers are told of the step, and whether any rank was asked to stop.
        """
        before = self.position
        number = before.step + 1
        tokens = self.stage.tokens_per_step
        event = StepEvent(number, tokens, seconds=None, figures={})
        if self.stage.name:
            event.figures["stage"] = self.stage.number + 1
        after = before.changed(step=number, tokens_seen=before.tokens_seen + tokens)
        if number in before.skipped_steps:
            self.position = after
            self._record_skipped(event)
            return event, False

        rate = self._learning_rate(before)
        started = time.perf_counter()
        stop_requested = False
        for tried in range(TRIES):
            totals = self._compute(before.step, rate, stop=signals.received is not None)
            stop_requested = totals.stop
            seconds = time.perf_counter() - started
            # Every try counts: this is the time that the run has used.
            after = after.changed(seconds=before.seconds + seconds)
            if totals.applied:
                self.engine.check_moments()
                event.seconds = seconds
                self.position = after
                self._record(event, totals, rate, recomputed=tried > 0)
                return event, stop_requested
            warn_on_rank0(
                _logger,
                "step %d: its loss or gradient is not finite; no weight was changed",
                number,
            )
        self.position = after.skipping(number)
        self._record_skipped(event)
        return event, stop_requested

    def _learning_rate(self, position: Position) -> float:
        """The rate of the step after `position`, before the factors of groups."""
        stage = self.stage
        rate = learning_rate(position.step - stage.first_step, stage.config.schedule)
        if position.cool_down is not None:
            rate = cooled_rate(rate, position, self.config)
        return rate * position.learning_rate_factor

    def _compute(self, steps_before: int, rate: float, *, stop: bool) -> StepTotals:
        """Computes the step after `steps_before` steps once.

        It changes the weights if the gradient is finite.
        """
        sums = StepSums(self.device)
        self.engine.model.equals_base = steps_before == 0 and self.inputs.starts_at_base
        batches = self.batches.micro_batches(steps_before - self.stage.first_step)
        # To wait for the next micro-batch is a phase of its own.
        while True:
            with self.phases("data"):
                batch = next(batches, None)
            if batch is None:
                break
            with self.phases("forward"):
                losses = self.engine.loss(batch)
            with self.phases("backward"):
                self.engine.backward(losses.total)
            with self.phases("step"):
                self.engine.end_micro_batch(rate)
            sums.add(losses, batch)
        with self.phases("communication"):
            return sums.over_all_ranks(self.engine, stop=stop)

    def _record(
        self, event: StepEvent, totals: StepTotals, rate: float, *, recomputed: bool
    ) -> None:
        """Records a step that changed the weights.

        Its figures go into `event`, and what later decisions need into `position`.
        """
        event.figures["learning_rate"] = rate
        event.figures.update(totals.figures())
        if totals.nll_per_token is not None:
            record = StepRecord(event.step, totals.nll_per_token, totals.gradient_norm)
            self.position = self.position.recording(record, self.config.stability)
        if recomputed:
            count = self.position.recomputed_steps + 1
            self.position = self.position.changed(recomputed_steps=count)
            event.figures["recomputed_steps"] = count
        self._count_skipped(event)

    def _record_skipped(self, event: StepEvent) -> None:
        """Records a step whose samples were skipped."""
        warn_on_rank0(_logger, "step %d: skipped; no weight was changed", event.step)
        self._count_skipped(event)
        if self.position.rollbacks > 0:
            event.figures["rollbacks"] = self.position.rollbacks

    def _count_skipped(self, event: StepEvent) -> None:
        """Adds to the figures how many steps were skipped so far, if any was."""
        # Steps to come may be among them, after a rollback.
        skipped = [step for step in self.position.skipped_steps if step <= event.step]
        if skipped:
            event.figures["skipped_steps"] = len(skipped)

    def _validate(self, event: StepEvent) -> UserError | None:
        """Scores the held-out parts after a step; `event` gets the figures.

        Returns the error that ends the run, if an observer set one.
        """
        with self.phases("validation"):
            self.scores = self.validator.validate(self.engine)
            validation = ValidationEvent(self.position, self.scores, score_figures(self.scores))
            for observer in self.observers:
                observer.on_validation(validation)
        self.position = validation.position
        event.figures.update(validation.figures)
        event.texts.update(validation.texts)
        return validation.stop

    def _validate_ends(self) -> None:
        """Scores the model before its first step, or where no step is left.

        Forgetting is measured from the scores before the first step.
        """
        if 0 < self.position.step < self.last_step:
            return
        with self.phases("validation"):
            self.scores = self.validator.validate(self.engine)
        if self.position.step == 0:
            event = StepEvent(0, 0, seconds=None, figures=score_figures(self.scores))
            for observer in self.observers:
                observer.on_step(event)
            initial = {name: score.nll_per_token for name, score in self.scores.items()}
            self.position = self.position.changed(
                initial_nll_per_token=initial,
                scored_sequences=self.config.validation.max_sequences,
            )

    def _report(self, event: StepEvent) -> None:
        """Tells the observers that a step is finished."""
        if self.checkpoints.failed_saves > 0:
            event.figures["failed_saves"] = self.checkpoints.failed_saves
        for observer in self.observers:
            observer.on_step(event)

    def _roll_back(self, spike: Sequence[StepRecord]) -> None:
        """Restores the newest checkpoint before `spike`, whose samples are then skipped.

        Ends the run if there is no such checkpoint, or after too many rollbacks.
        """
        config = self.config
        position = self.position
        first = spike[0].step
        last = spike[-1].step
        found = f"steps {first} to {last} are a spike (loss {spike[-1].loss:.4f})"
        if position.rollbacks >= config.stability.max_rollbacks:
            limit = "as many as stability.max_rollbacks"
            reason = f"{found} after {position.rollbacks} rollbacks, {limit}"
            end_diverged(config, position, reason)
        # The update of the step before the spike began it: that step is skipped too.
        skipped = range(first - 1, last + 1)
        with self.phases("checkpoint"):
            self.checkpoints.finish()
            earlier = self.checkpoints.resume(self._engine_after, before=skipped.start)
            if earlier is None:
                end_diverged(config, position, f"{found}, and no checkpoint lies before it")
            message = "%s; rolling back to step %d and skipping steps %d to %d"
            warn_on_rank0(_logger, message, found, earlier.step, skipped[0], skipped[-1])
            # The counts and the skipped steps are the whole run's; everything else is the
            # checkpoint's.
            self.position = earlier.skipping(*position.skipped_steps, *skipped).changed(
                rollbacks=position.rollbacks + 1,
                recomputed_steps=position.recomputed_steps,
                seconds=position.seconds,
            )
            check_skipped_steps(config, self.position)
            self.checkpoints.record_rollback(self.position)
            for observer in self.observers:
                observer.on_rollback(self.position.step)


ObserverFactory = Callable[[Trainer], Iterable[Observer]]
"""Makes a run's observers on every rank.

`pipeline.observers.make_observers` makes those of the configuration.
"""
