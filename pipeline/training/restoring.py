"""Setting weights and optimizer state into a DeepSpeed engine from a checkpoint of any layout.

Every rank reads, tensor by tensor, what its own optimizer holds; a checkpoint of the same layout comes back to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.zero_files import Moment
from pipeline.errors import CheckpointError
from pipeline.parallel.parameter import held_values, named_trained_parameters
from pipeline.parallel.topology import TensorParallel


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
