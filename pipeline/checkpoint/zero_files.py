"""The files that the data-parallel ranks of one tensor-parallel rank save, by ZeRO stage."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.checkpoint.torch_files import open_torch_file
from pipeline.checkpoint.zero_layout import Fragments, Span, each_cut, joined_and_cut, overlapping
from pipeline.errors import CheckpointError

Moment = Literal["exp_avg", "exp_avg_sq"]
_MALFORMED = (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError)


class SavedShards(ABC):
    """One tensor-parallel rank's shards of all parameters, read back from what ZeRO cut them into."""

    weights_key: str
    optimizer_key: str

    def __init__(self, models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]) -> None:
        """`optimizers[dp_rank]` is what each rank's optimizer saved; `models` are the files of the model itself."""
        self.models = models
        self.optimizers = optimizers
        self.shapes = {name: tuple(shape) for group in models[0]["param_shapes"] for name, shape in group.items()}
        self.fragments = self.layout()

    @abstractmethod
    def layout(self) -> Fragments:
        """Where each trained parameter lies."""

    @property
    @abstractmethod
    def frozen_names(self) -> Collection[str]:
        """The frozen parameters that were saved too."""

    @abstractmethod
    def read_frozen(self, name: str) -> Tensor:
        """The shard of a frozen parameter."""

    def read(self, name: str, moment: Moment | None = None) -> Tensor:
        """The shard of a trained parameter in fp32, or a moment of it."""
        shape = self.shapes[name]
        return self.read_span(name, moment, (0, math.prod(shape))).view(shape)

    def read_span(self, name: str, moment: Moment | None, span: Span) -> Tensor:
        """A run of the flattened shard; other parts of the files are not touched."""
        pieces = [
            self._flat(fragment.dp_rank, fragment.group, moment).narrow(0, fragment.start, fragment.length)
            for fragment in overlapping(self.fragments[name], span)
        ]
        return torch.cat(pieces)

    @property
    def adam_step(self) -> Tensor:
        """How many steps Adam has counted."""
        slots = next(iter(self.optimizers[0][self.optimizer_key]["state"].values()))
        return torch.as_tensor(slots["step"])

    def _flat(self, dp_rank: int, group: int, moment: Moment | None) -> Tensor:
        optimizer = self.optimizers[dp_rank]
        if moment is None:
            weights: Tensor = optimizer[self.weights_key][group]
            return weights
        state: Tensor = optimizer[self.optimizer_key]["state"][group][moment]
        return state


class ReplicatedShards(SavedShards):
    """ZeRO 1 and 2: every rank holds the parameters; what the optimizer holds is cut."""

    weights_key = "single_partition_of_fp32_groups"
    optimizer_key = "base_optimizer_state"

    def layout(self) -> Fragments:
        groups_of = (rank["param_slice_mappings"] for rank in self.optimizers)
        fragments = joined_and_cut(
            [
                [{name: (run.start, run.numel) for name, run in group.items()} for group in groups]
                for groups in groups_of
            ]
        )
        for name, shape in self.shapes.items():
            if sum(fragment.length for fragment in fragments[name]) != math.prod(shape):
                raise ValueError(f"the pieces of {name} do not make the shape {shape}")
        return fragments

    @cached_property
    def frozen_names(self) -> Collection[str]:
        return [name for name in self.models[0]["module"] if name not in self.shapes]

    def read_frozen(self, name: str) -> Tensor:
        shard: Tensor = self.models[0]["module"][name]
        return shard


class PartitionedShards(SavedShards):
    """ZeRO 3: the parameters themselves are cut, the frozen ones as well."""

    weights_key = "fp32_flat_groups"
    optimizer_key = "optimizer_state_dict"

    def layout(self) -> Fragments:
        if any(model["param_shapes"] != self.models[0]["param_shapes"] for model in self.models):
            raise ValueError("its data-parallel ranks saved different parameters")
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        group_sizes = [[flat.numel() for flat in rank[self.weights_key]] for rank in self.optimizers]
        if any(sizes_there != group_sizes[0] for sizes_there in group_sizes):
            raise ValueError("its data-parallel ranks saved flat tensors of different lengths")
        return each_cut(sizes, group_sizes[0], len(self.optimizers))

    @property
    def frozen_names(self) -> Collection[str]:
        return self.models[0].get("frozen_param_shapes") or ()

    def read_frozen(self, name: str) -> Tensor:
        shape = tuple(self.models[0]["frozen_param_shapes"][name])
        pieces = [model["frozen_param_fragments"][name].flatten() for model in self.models]
        return torch.cat(pieces).narrow(0, 0, math.prod(shape)).view(shape)


def saved_shards(folder: Path, tp_rank: int, optimizer_files: Sequence[Path]) -> SavedShards:
    """Opens the files of tensor-parallel rank `tp_rank`; `optimizer_files` are those of its data-parallel ranks.

    Raises:
        CheckpointError: a file is missing, damaged, or not laid out as DeepSpeed does.
    """
    try:
        optimizers = [open_torch_file(file)["optimizer_state_dict"] for file in optimizer_files]
        # DeepSpeed's bf16 optimizer, which it takes for stage 1 with fp32 gradients, does not name its stage.
        if int(optimizers[0].get("zero_stage", 1)) < 3:
            return ReplicatedShards([open_torch_file(folder / f"mp_rank_{tp_rank:02d}_model_states.pt")], optimizers)
        names = (f"zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_model_states.pt" for dp_rank in range(len(optimizers)))
        return PartitionedShards([open_torch_file(folder / name) for name in names], optimizers)
    except _MALFORMED as error:
        raise CheckpointError(
            f"{folder}: tensor-parallel rank {tp_rank} is not laid out as DeepSpeed's ZeRO 1, 2 or 3 "
            f"({type(error).__name__}: {error}); use another checkpoint"
        ) from None
