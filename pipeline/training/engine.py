"""The model under DeepSpeed: build, step, evaluate, save and restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod

import deepspeed
import torch
from torch import Tensor

from pipeline.checkpoint.rank_files import CheckpointReader, Index, RankState
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import ConfigError, in_one_line
from pipeline.methods.parameter_groups import stages_of
from pipeline.model.causal_decoder import CausalDecoder, LogitsPath
from pipeline.model.chunked_loss import Losses
from pipeline.model.decoder import REFERENCE
from pipeline.model.hidden_states import HiddenStates
from pipeline.optimizers.optimizer import optimizer_named
from pipeline.parallel.cross_entropy import greedy_choices_
from pipeline.parallel.parameters import full_shape_of
from pipeline.parallel.ranks import run_on_all_ranks
from pipeline.parallel.topology import ProcessGroups
from pipeline.training.batches import MicroBatch
from pipeline.training.deepspeed_internals import (
    gradients_in_place,
    lifecycle,
    optimizer_state,
    zero_parameters,
)
from pipeline.training.frozen_in_stage import (
    ParameterFrozenInStage,
    initially_frozen,
    restored_frozen,
)
from pipeline.training.grouped_optimizer import make_optimizer


class Engine:
    """A model that trains under DeepSpeed.

    Attributes:
        model: the decoder; under ZeRO-3 a parameter has values only while its module runs.
        trainable_parameters, total_parameters: how many elements the whole model has, each counted
            once. Trainable are those that train in this stage of the run, or did in an earlier one.
        routed: whether the model chooses a path per token.
    """

    def __init__(
        self,
        model: CausalDecoder,
        config: RunConfig,
        deepspeed_config: DeepSpeedConfig,
        groups: ProcessGroups,
        *,
        trained_before: Sequence[Sequence[str]] = (),
        checkpoint: Index | None = None,
    ) -> None:
        """Wraps `model` in DeepSpeed's engine; every rank must call it.

        What is frozen must be the same on all data-parallel ranks: it is not broadcast.

        Args:
            model: the model, with its values before the first step.
            config: the run, or one stage of it.
            deepspeed_config: the run's.
            groups: the process groups of the ranks.
            trained_before: the setting `trains` of each earlier stage.
            checkpoint: the one that `restore` is to load, where the run has stages.

        Raises:
            ConfigError: DeepSpeed refuses the settings of its file.
        """
        self.trainable_parameters = 0
        self.total_parameters = 0
        # Counts of steps differ between parameters only where stages train some of them.
        self._has_several_counts = bool(model.frozen_in_stage or trained_before)
        # From the full shapes: under tensor parallelism a rank has shards, and under ZeRO-3 `numel`
        # is 0.
        for name, parameter in model.named_parameters():
            if name.startswith(REFERENCE):
                continue  # the frozen copy of the base, for KL, is no part of the model
            size = prod(full_shape_of(parameter))
            self.total_parameters += size
            has_trained = name in model.frozen_in_stage and stages_of(name, trained_before)
            if parameter.requires_grad or has_trained:
                self.trainable_parameters += size
        self._optimizer = optimizer_named(config.schedule.optimizer)
        self._moments_checked = False
        self.routed = model.plan is not None and model.plan.routed
        self.tensor_parallel = groups.tensor_parallel
        self._tokens_per_micro_batch = (
            config.schedule.micro_batch_size * config.data.sequence_length
        )
        self._frozen_in_stage = self._freeze_in_stage(model, groups, config, checkpoint)
        if config.compile:
            model.compile_layers()
            model.output.compile_loss = True
        # Of trained parameters alone: DeepSpeed's optimizer state and fp32 copies then exist for
        # them only, and the base costs its 16-bit weights.
        optimizer = make_optimizer(
            model,
            config.schedule,
            frozen_in_stage=model.frozen_in_stage,
            trained_before=trained_before,
        )
        zero_parameters.gather_whole(model.modules_gathered_whole())
        if deepspeed_config.zero_stage == 3:
            zero_parameters.keep_shared_experts_whole(model)
        values = deepspeed_config.merged(config.schedule, groups.layout)
        try:
            with zero_parameters.frozen_kept_as_read(model):
                self._engine, *_ = deepspeed.initialize(
                    model=model,
                    optimizer=optimizer,
                    config=values,
                    mpu=groups,
                    dist_init_required=False,
                )
        except AssertionError as error:
            # Its ZeRO optimizers assert that settings do not exclude each other.
            raise ConfigError(
                f"{deepspeed_config.path}: DeepSpeed refuses it: {in_one_line(error)}; correct the "
                "file"
            ) from None
        self.model: CausalDecoder = self._engine.module
        zero_parameters.attach_zero_partitions(self.model)
        optimizer_state.attach_optimizer(self._engine, self.model, self._optimizer, groups)
        gradients_in_place.leave_gradients_in_place(self._engine, groups.layout)

    def _freeze_in_stage(
        self,
        model: CausalDecoder,
        groups: ProcessGroups,
        config: RunConfig,
        checkpoint: Index | None,
    ) -> dict[str, ParameterFrozenInStage]:
        """What is frozen in this stage, by name; every rank must call it."""
        if not model.frozen_in_stage:
            return {}
        if checkpoint is None:
            return initially_frozen(model, groups)
        reader = CheckpointReader(checkpoint, model)
        restored = partial(restored_frozen, model, groups, config.schedule, reader)
        return run_on_all_ranks(restored)

    def close(self) -> None:
        """Frees the model and the optimizer, before others are made; every rank must call it."""
        lifecycle.destroy(self._engine, self.model)

    def loss(self, batch: MicroBatch) -> Losses:
        # DeepSpeed calls the model's `forward`, whose arguments are the fields of `MicroBatch`.
        return Losses(*self._engine(*batch))

    def backward(self, loss_sum: Tensor) -> None:
        """Adds the gradient of a micro-batch. loss_sum: scalar.

        DeepSpeed averages over accumulated micro-batches and data-parallel ranks. The gradient of a
        step is therefore the gradient of the summed loss over
        `global_batch_size * sequence_length`, however the batch is spread. The gradient of a loss
        that is not finite is made NaN: DeepSpeed finds it in the norm, on every rank, before it
        changes any weight.
        """
        # The gradient of `loss_sum * nan` is NaN even where that of the loss would be finite.
        # On the device, without a wait: the host learns of it with the norm at the end of the step.
        finite = torch.where(loss_sum.detach().isfinite(), 1.0, torch.nan)
        self._engine.backward(loss_sum * finite / self._tokens_per_micro_batch)

    def end_micro_batch(self, learning_rate: float) -> None:
        """Ends a micro-batch; after the last one of a step it updates the weights.

        It does not if the gradient is not finite.
        """
        for group in self._engine.optimizer.param_groups:
            # Set before every step instead of by DeepSpeed's scheduler, which would have a state of
            # its own beside the run's position, and which a rollback would have to turn back.
            group["lr"] = learning_rate * group["learning_rate_factor"]
        self._engine.step()

    def check_moments(self) -> None:
        """Checks, after the first update, that it stored what checkpoints save.

        At once, because the first save may be hours away. Every rank must call it.

        Raises:
            ExtensionError: it stored something else, on the lowest rank that finds it. The other
                ranks raise SystemExit.
        """
        if self._moments_checked:
            return
        check = partial(optimizer_state.check_moments, self._engine, self.model, self._optimizer)
        run_on_all_ranks(check)
        self._moments_checked = True

    @property
    def step_applied(self) -> bool:
        """Whether the last step changed weights and moments; all ranks agree.

        It did if its gradient was finite.
        """
        return bool(self._engine.was_step_applied())

    @property
    def gradient_norm(self) -> float:
        """The global norm of the last step's gradient, before clipping."""
        return float(self._engine.get_global_grad_norm())

    @torch.no_grad()
    def hidden_states(self, batch: MicroBatch, path: LogitsPath) -> HiddenStates:
        """The normalised hidden states along `path`, one row per token: [B·S, ...]."""
        return self.model.hidden_states(batch.tokens, batch.positions, batch.documents, path=path)

    @torch.no_grad()
    def logit_chunks(self, *hidden: HiddenStates) -> Iterator[tuple[Tensor, ...]]:
        """This rank's columns of the logits of each of `hidden`, in chunks of n tokens.

        Each chunk has fp32 tensors [n, columns]. Every rank must exhaust the iterator. The logits
        of a whole batch would not fit on a GPU.
        """
        output = self.model.output
        # ZeRO-3 gathers parameters only around a module's forward, which this is not.
        with deepspeed.zero.GatheredParameters(list(output.parameters(recurse=False))):
            for rows in output.chunks(len(hidden[0].x)):
                chunks = []
                for states in hidden:
                    # The last rank's part of the vocabulary may be padded.
                    chunks.append(output.logits(states.rows(rows))[:, : output.columns])
                yield tuple(chunks)

    @torch.no_grad()
    def likeliest_tokens(self, hidden: HiddenStates) -> Tensor:
        """The likeliest next token of each row of `hidden`: int64 [N]. Every rank must call it."""
        output = self.model.output
        # As in `logit_chunks`; the logits of a few rows are no larger than a chunk.
        with deepspeed.zero.GatheredParameters(list(output.parameters(recurse=False))):
            columns = greedy_choices_(output.logits(hidden), **output.vocabulary.range)
        return output.vocabulary.tokens_of(columns)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients, and the model in evaluation mode."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def state(self) -> RankState:
        """What this rank holds of all that the method trains, and the random states.

        The values are views.
        """
        first, values, counts = optimizer_state.held_by_rank(
            self._engine, self.model, self._optimizer
        )
        # Equal for all parameters, unless stages train others: those are kept by name.
        adam_step = next(reversed(counts.values()), torch.tensor(0.0))
        adam_steps: dict[str, int] = {}
        if self._has_several_counts:
            adam_steps = {name: int(count) for name, count in counts.items()}
        for name, parameter in self._frozen_in_stage.items():
            first[name] = parameter.first
            adam_steps[name] = parameter.adam_step
            # The weights first, then the moments: a reader counts on this order.
            for stored, value in parameter.values.items():
                values[f"{name}/{stored}"] = value
        random_state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random_state["cuda"] = torch.cuda.get_rng_state()
        return RankState(
            self.tensor_parallel.rank,
            self.tensor_parallel.size,
            first,
            values,
            adam_step,
            random_state,
            adam_steps,
        )

    def restore(self, index: Index) -> None:
        """Loads this rank's optimizer state from a checkpoint of any layout.

        It is no collective: `publish_restored` follows. The base is in the model already.
        """
        reader = CheckpointReader(index, self.model)
        optimizer_state.restore(
            self._engine, self.model, self._optimizer, reader, self.tensor_parallel
        )

    def publish_restored(self, step: int) -> None:
        """Copies what `restore` loaded into the model, whose state is that after `step` steps.

        Every rank must call it.
        """
        optimizer_state.publish(self._engine, self.model, step)
