"""The model under DeepSpeed: build, step, evaluate, save and restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod

import deepspeed
import torch
from torch import Tensor

from pipeline import methods
from pipeline.checkpoint.rank_files import CheckpointReader, Index, RankState
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import ConfigError, in_one_line
from pipeline.model.base_folder import BaseFolder
from pipeline.model.chunked_loss import Losses
from pipeline.model.decoder import REFERENCE, Decoder, LogitsPath
from pipeline.model.hidden_states import HiddenStates
from pipeline.parallel.sharding import default_dtype, full_shape_of
from pipeline.parallel.topology import ProcessGroups
from pipeline.training import deepspeed_internals
from pipeline.training.batches import MicroBatch
from pipeline.training.muon import make_optimizer


def build_model(
    config: RunConfig,
    base: BaseFolder,
    deepspeed_config: DeepSpeedConfig,
    groups: ProcessGroups,
    device: torch.device | None = None,
) -> Decoder:
    """The run's model with unset values; every rank must call it, and holds at most the shard that it will train.

    Under ZeRO-1 and 2 it is made on `device`, where it stays: the shards of a node's ranks may not fit its host memory.
    """
    partitioning = deepspeed_internals.partitioning_context(config, deepspeed_config, groups)
    on_device = device if device is not None and deepspeed_config.zero_stage < 3 else nullcontext()
    with default_dtype(deepspeed_config.dtype), partitioning, on_device:
        model = methods.build_model(config, base.spec, groups.tensor_parallel)
    deepspeed_internals.attach_zero_partitions(model)
    return model


class Engine:
    """A model that trains under DeepSpeed.

    Attributes:
        model: the decoder; under ZeRO-3 a parameter has values only while its module runs.
        trainable_parameters, total_parameters: how many elements the whole model has, each counted once.
        routed: whether the model chooses a path per token.
    """

    def __init__(
        self,
        model: Decoder,
        config: RunConfig,
        deepspeed_config: DeepSpeedConfig,
        groups: ProcessGroups,
    ) -> None:
        """Wraps `model` in DeepSpeed's engine; every rank must call it."""
        sizes = [
            (prod(full_shape_of(parameter)), parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if not name.startswith(REFERENCE)
        ]
        self.trainable_parameters = sum(size for size, is_trained in sizes if is_trained)
        self.total_parameters = sum(size for size, _ in sizes)
        self.routed = model.plan is not None and model.plan.routed
        self.tensor_parallel = groups.tensor_parallel
        self._tokens_per_micro_batch = (
            config.schedule.micro_batch_size * config.data.sequence_length
        )
        if config.compile:
            model.compile_layers()
        optimizer = make_optimizer(model, config.schedule)
        values = deepspeed_config.merged(config.schedule, groups.layout)
        try:
            self._engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=values,
                mpu=groups,
                dist_init_required=False,
            )
        except (
            AssertionError
        ) as error:  # its ZeRO optimizers say so of settings that exclude each other
            raise ConfigError(
                f"{deepspeed_config.path}: DeepSpeed refuses it: {in_one_line(error)}"
            ) from None
        self.model: Decoder = self._engine.module
        deepspeed_internals.attach_zero_partitions(self.model)
        deepspeed_internals.attach_muon(self._engine, self.model, groups)

    def loss(self, batch: MicroBatch) -> Losses:
        return Losses(*self._engine(*batch))

    def backward(self, loss_sum: Tensor) -> None:
        """Adds the gradient of a micro-batch. loss_sum: scalar.

        DeepSpeed averages over accumulated micro-batches and data-parallel ranks. So the gradient of a step is that of
        the summed loss over `global_batch_size · sequence_length`, however the batch is spread. That of a loss that is
        not finite is made NaN, which DeepSpeed finds in the norm, on every rank, before it changes any weight.
        """
        finite = torch.where(loss_sum.detach().isfinite(), 1.0, torch.nan)
        self._engine.backward(loss_sum * finite / self._tokens_per_micro_batch)

    def step(self, learning_rate: float) -> None:
        """Ends a micro-batch; after the last of a step it updates the weights, if the gradient is finite."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()

    @property
    def step_applied(self) -> bool:
        """Whether the last step changed weights and moments, as it did if its gradient was finite; all ranks agree."""
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
        """This rank's columns of the logits of each of `hidden`, in chunks of n tokens: [n, columns] in fp32.

        Every rank must exhaust it. The logits of a whole batch would not fit on a GPU.
        """
        output = self.model.output
        # ZeRO-3 gathers parameters only around a module's forward, which this is not.
        with deepspeed.zero.GatheredParameters(list(output.parameters(recurse=False))):
            for rows in output.chunks(len(hidden[0].x)):
                yield tuple(
                    output.logits(states.rows(rows))[:, : output.columns] for states in hidden
                )

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
        """What this rank's optimizer holds of the trained parameters, and the random states; the values are views."""
        first, values, adam_step = deepspeed_internals.optimizer_state(self._engine, self.model)
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
        )

    def restore(self, index: Index) -> None:
        """Loads this rank's optimizer state from a checkpoint of any layout; no collective. The base is there."""
        reader = CheckpointReader(index, self.model)
        deepspeed_internals.restore(self._engine, self.model, reader, self.tensor_parallel)

    def publish_restored(self, step: int) -> None:
        """Copies what `restore` loaded into the model, the state after `step` steps; every rank must call it."""
        deepspeed_internals.publish(self._engine, self.model, step)
