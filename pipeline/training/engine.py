"""The model in DeepSpeed's hands. Whatever must be known about DeepSpeed to train, save and load is in this file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, get_args

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline import methods
from pipeline.checkpoint.reader import CheckpointReader, Moment
from pipeline.config.run import RunConfig, Schedule
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder, LogitsPath
from pipeline.model.output import HiddenStates, Losses
from pipeline.parallel.ranks import run_on_all_ranks, summed
from pipeline.parallel.sharding import default_dtype, full_shape_of, held_values, named_trained_parameters, partition_of
from pipeline.parallel.topology import ProcessGroups, TensorParallel
from pipeline.training.batches import MicroBatch

# --- Building a run's model, so that no rank ever holds more of it than it will train with --------------------------


def build_model(
    config: RunConfig, base: BaseFolder, deepspeed_config: DeepSpeedConfig, groups: ProcessGroups
) -> Decoder:
    """The run's model, its values not yet set; every rank must call it.

    Under ZeRO-3 each parameter is partitioned as soon as it is made, so that a rank never holds a whole shard.
    """
    with ExitStack() as contexts:
        contexts.enter_context(default_dtype(deepspeed_config.dtype))
        if deepspeed_config.partitions_at_once:
            partitioned = _PartitionedUnset(
                data_parallel_group=groups.get_data_parallel_group(),
                config_dict_or_path=deepspeed_config.merged(config.schedule, groups.layout),
                mpu=groups,
                mem_efficient_linear=False,  # else it would replace torch's linear map for good
            )
            contexts.enter_context(partitioned)
        return methods.build_model(config, base, groups.tensor_parallel)


class _PartitionedUnset(deepspeed.zero.Init):  # type: ignore[misc]
    """Partitions parameters as they are made, and sends nothing: DeepSpeed would have one rank tell the others their
    values, of which there are none yet. So the whole tensor's memory is never touched either."""

    def _zero_init_param(self, param: nn.Parameter) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()  # type: ignore[attr-defined]


# --- Setting weights and optimizer state into a DeepSpeed engine from a checkpoint of any layout --------------------
# Every rank reads, tensor by tensor, what its own optimizer holds; a checkpoint of the same layout comes back to the
# bit.


@dataclass(frozen=True)
class Piece:
    """The run of a parameter's flattened shard, from element `first` on, that this rank's optimizer updates.

    `flat` holds the fp32 weights of many parameters in a row, this piece's from `start` on; so does each moment.
    """

    parameter: nn.Parameter
    flat: Tensor
    start: int
    first: int
    length: int

    def view(self, whole: Tensor) -> Tensor:
        """This piece's place in `whole`: `flat`, or a moment of it."""
        return whole.detach().narrow(0, self.start, self.length)


@torch.no_grad()
def restore(model: nn.Module, optimizer: Any, reader: CheckpointReader, tp: TensorParallel) -> None:  # noqa: ANN401
    """Sets the fp32 weights, both moments and the step count of DeepSpeed's `optimizer`; no rank waits for another.

    The weights that the model computes with follow in `publish`.

    Raises:
        CheckpointError: the checkpoint lacks a parameter or is damaged, or the optimizer's state lies on NVMe.
    """
    state = optimizer.optimizer.state
    for name, piece in _pieces(model, optimizer):
        span = (piece.first, piece.first + piece.length)
        piece.view(piece.flat).copy_(reader.read_span(name, None, tp.rank, tp.size, span))
        slots = state[piece.flat]
        slots["step"] = reader.adam_step.clone().to(piece.flat.device)
        for moment in get_args(Moment):
            if moment not in slots:
                slots[moment] = torch.zeros_like(piece.flat, requires_grad=False)
            piece.view(slots[moment]).copy_(reader.read_span(name, moment, tp.rank, tp.size, span))


@torch.no_grad()
def publish(model: nn.Module, optimizer: Any) -> None:  # noqa: ANN401
    """Brings the weights that the model computes with, on all ranks, to those that the optimizer holds."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.update_lp_params()
        return
    # Small parameters are kept whole on every rank; they are gathered anew from what is set here.
    optimizer.checkpoint_event_prologue()
    for _, piece in _pieces(model, optimizer):
        held_values(piece.parameter)[: piece.length].copy_(piece.view(piece.flat))
    optimizer.checkpoint_event_epilogue()


def _pieces(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Piece]]:  # noqa: ANN401
    """What this rank's optimizer holds of each trained parameter, by name."""
    for name, parameter in named_trained_parameters(model):
        partitioned = hasattr(optimizer, "fp32_partitioned_groups_flat")
        piece = _partitioned_piece(parameter, optimizer) if partitioned else _replicated_piece(parameter, optimizer)
        if piece is not None and piece.length > 0:
            yield name, piece


def _partitioned_piece(parameter: nn.Parameter, optimizer: Any) -> Piece | None:  # noqa: ANN401
    """ZeRO-3 cuts every parameter in equal pieces, the last of which end in padding."""
    group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    if flat is None or flat.numel() < start + length:
        raise CheckpointError("zero_optimization.offload_optimizer.device: state on NVMe cannot be resumed; use cpu")
    first = length * dist.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
    held = max(0, min(length, parameter.ds_numel - first))  # type: ignore[attr-defined]
    return Piece(parameter, flat, start, first, held)


def _replicated_piece(parameter: nn.Parameter, optimizer: Any) -> Piece | None:  # noqa: ANN401
    """ZeRO 1 and 2 join the parameters of a group and cut once: a rank may hold nothing of many of them."""
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
    in_flat, in_shard = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Piece(parameter, flat, in_flat.start, in_shard.start, in_flat.numel)


# --- The model in DeepSpeed's hands. Whatever must be known about ---

WriteFile = Callable[[Path, Any], None]
"""Writes a value to a file, now or soon."""

# DeepSpeed calls torch's collectives by names that torch is about to retire.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")


class Engine:
    """A model that trains under DeepSpeed.

    Attributes:
        model: the decoder; under ZeRO-3 its parameters are there only while their module runs.
        trainable_parameters, total_parameters: how many elements the whole model has, each counted once.
        routed: whether the model chooses a path per token.
        tensor_parallel: this rank's place among its tensor-parallel neighbours.
    """

    def __init__(
        self, model: Decoder, config: RunConfig, deepspeed_config: DeepSpeedConfig, groups: ProcessGroups
    ) -> None:
        """Hands `model` to DeepSpeed; every rank must.

        Raises:
            ConfigError: DeepSpeed refuses its JSON file.
        """
        self.trainable_parameters = sum(prod(full_shape_of(one)) for _, one in named_trained_parameters(model))
        self.total_parameters = sum(prod(full_shape_of(one)) for one in model.parameters())
        self.routed = model.plan is not None and model.plan.routed
        self.tensor_parallel = groups.tensor_parallel
        self._dp_group = groups.get_data_parallel_group()
        self._tokens_per_micro_batch = config.schedule.micro_batch_size * config.data.sequence_length
        optimizer = adamw(model, config.schedule)
        try:
            self._engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=deepspeed_config.merged(config.schedule, groups.layout),
                mpu=groups,
                dist_init_required=False,
            )
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise ConfigError(f"{deepspeed_config.path}: DeepSpeed refuses it: {faults}") from None
        # DeepSpeed would put scripts beside the checkpoints that assemble a model without its frozen parameters.
        self._engine._copy_recovery_script = lambda save_path: None
        self.model: Decoder = self._engine.module

    def loss(self, batch: MicroBatch) -> Losses:
        """How well the targets of a micro-batch are predicted."""
        return Losses(*self._engine(*batch))

    def backward(self, nll_sum: Tensor) -> None:
        """Adds the gradient of a micro-batch.

        DeepSpeed averages over accumulated micro-batches and data-parallel ranks; so the gradient of a step is that of
        the summed nll over `global_batch_size · sequence_length`, however the batch is spread.

        A loss that is not finite may have a finite gradient. Here it gets none, which DeepSpeed finds in the norm, on
        all ranks alike, before it changes any weight.
        """
        finite = torch.where(nll_sum.detach().isfinite(), 1.0, torch.nan)
        self._engine.backward(nll_sum * finite / self._tokens_per_micro_batch)

    def step(self, learning_rate: float) -> None:
        """Counts a micro-batch, and after the last one of a step updates the weights, if the gradient is finite."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()

    @property
    def step_applied(self) -> bool:
        """Whether the last step changed the weights; one whose gradient is not finite leaves no trace. All ranks agree.

        The norm that clipping needs tells DeepSpeed; it then clears the gradients and touches neither moment.
        """
        return bool(self._engine.was_step_applied())

    @property
    def gradient_norm(self) -> float:
        """The global norm of the last step's gradient, before clipping."""
        return float(self._engine.get_global_grad_norm())

    @torch.no_grad()
    def hidden_states(self, batch: MicroBatch, path: LogitsPath) -> HiddenStates:
        """The normalised hidden states along `path`, a row a token."""
        return self.model.hidden_states(batch.tokens, batch.positions, batch.document_ids, path=path)

    @torch.no_grad()
    def logit_chunks(self, *hidden: HiddenStates) -> Iterator[tuple[Tensor, ...]]:
        """This rank's columns of the logits of each of `hidden`, some tokens at a time: [n, columns] in fp32.

        Every rank must go through all of them. Logits of a whole batch would not fit on a GPU.
        """
        output = self.model.output
        # ZeRO-3 gathers a module's parameters around its forward, and this is not one.
        with deepspeed.zero.GatheredParameters(list(output.parameters(recurse=False))):
            for rows in output.chunks(len(hidden[0].x)):
                yield tuple(output.logits(states.rows(rows))[:, : output.columns] for states in hidden)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients, and nothing that differs between training and use."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def optimizer_state_elements(self) -> int:
        """How many elements DeepSpeed's optimizer holds in its state tensors (the two Adam moments), over all ranks."""
        state = self._engine.optimizer.optimizer.state
        held = sum(
            value.numel()
            for slots in state.values()
            for name, value in slots.items()
            if isinstance(value, Tensor) and name != "step"
        )
        counted = torch.tensor(held, device=self._engine.device)
        return int(summed(counted))

    @torch.no_grad()
    def squared_norms(self) -> dict[str, float]:
        """The sum of squares of every trained parameter, over all ranks; every rank must call it."""
        named = list(named_trained_parameters(self.model))
        # Offloaded parameters lie on the host, others beside them do not.
        squares = torch.stack([self._share_of_square(parameter).to(self._engine.device) for _, parameter in named])
        return dict(zip((name for name, _ in named), summed(squares).tolist(), strict=True))

    def _share_of_square(self, parameter: Any) -> Tensor:  # noqa: ANN401  # DeepSpeed adds attributes of its own
        """This rank's share, so that the shares of all ranks sum to the square of the whole parameter."""
        replicas = partition_of(parameter).replicas(self.tensor_parallel.size)
        if not hasattr(parameter, "ds_tensor"):
            return parameter.double().square().sum() / (replicas * dist.get_world_size(self._dp_group))
        # ZeRO-3's partitions are equally long; what lies beyond the end of the last one is not the parameter's.
        partition = parameter.ds_tensor
        held = parameter.ds_numel - dist.get_rank(self._dp_group) * partition.numel()
        return partition.flatten()[: max(0, min(held, partition.numel()))].double().square().sum() / replicas

    def save(self, folder: Path, write: WriteFile) -> None:
        """Hands DeepSpeed's files of the trained parameters and their optimizer state, to lie in `folder`, to `write`.

        Every rank must call it.
        """
        self._engine.checkpoint_engine = CheckpointFiles(write)
        self._engine.save_checkpoint(
            str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=True
        )

    def load(self, folder: Path, step: int) -> None:
        """Restores what `save` wrote after `step` steps, at whatever layout; the base must be in place already.

        Learning rates and weight decay stay as the run's configuration has them.

        Raises:
            CheckpointError: the files are damaged, or hold other parameters than the model trains.
        """
        run_on_all_ranks(lambda: self._restore(CheckpointReader(folder, self.model)))
        publish(self.model, self._engine.optimizer)
        self._engine.global_steps = step

    def _restore(self, reader: CheckpointReader) -> None:
        restore(self.model, self._engine.optimizer, reader, self.tensor_parallel)


class CheckpointFiles(TorchCheckpointEngine):  # type: ignore[misc]
    """Where DeepSpeed's files go."""

    def __init__(self, write: WriteFile) -> None:
        super().__init__()
        self._write = write

    def save(self, state_dict: Any, path: str) -> None:  # noqa: ANN401
        # The optimizer's file holds the weights in fp32; the model's would hold them in 16 bits again, and beside them
        # a tied, frozen embedding, which DeepSpeed takes for a parameter that trains.
        if "module" in state_dict:
            state_dict = {**state_dict, "module": {}}
        self._write(Path(path), state_dict)


def adamw(model: nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW over the trained parameters alone; vectors (gains, biases) do not decay."""
    trained = [parameter for _, parameter in named_trained_parameters(model)]
    # By the whole shapes: what ZeRO-3 has partitioned is flat.
    matrices = [parameter for parameter in trained if len(full_shape_of(parameter)) > 1]
    vectors = [parameter for parameter in trained if len(full_shape_of(parameter)) <= 1]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=schedule.learning_rate, betas=schedule.betas, fused=True
    )
