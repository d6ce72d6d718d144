"""Reads DeepSpeed checkpoints of any ZeRO stage, data- and tensor-parallel size, one whole tensor at a time.

Neither DeepSpeed nor a process group is needed, and nothing in the files is executed. Files are mapped into memory:
what is held at a time is one parameter.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline.checkpoint.torch_files import open_torch_file
from pipeline.errors import CheckpointError
from pipeline.parallel.sharding import full_shape_of, merge, partition_of, split

# --- Where ZeRO puts each parameter: pure arithmetic over the flat tensors that the data-parallel ranks save --------
# DeepSpeed flattens the parameters that train and cuts them over the ranks. Stages 1 and 2 join all parameters of a
# group first and cut once, so that a rank holds a run of whole parameters; stage 3 cuts every parameter in equal
# pieces.


@dataclass(frozen=True)
class Fragment:
    """`length` elements from `start` on in flat tensor number `group` of data-parallel rank `dp_rank`."""

    dp_rank: int
    group: int
    start: int
    length: int


Fragments = dict[str, list[Fragment]]
"""For every parameter the runs that make up its flattened values, in order."""

Slices = Mapping[str, tuple[int, int]]
"""Start and length, by parameter name."""


Span = tuple[int, int]
"""The first element of a flattened tensor, and the one past the last."""


def overlapping(fragments: Sequence[Fragment], span: Span) -> Iterator[Fragment]:
    """The parts of `fragments`, which follow one another in a flattened tensor, that hold its elements in `span`."""
    at = 0
    for fragment in fragments:
        first, stop = max(span[0], at), min(span[1], at + fragment.length)
        if first < stop:
            yield replace(fragment, start=fragment.start + first - at, length=stop - first)
        at += fragment.length


def joined_and_cut(slices: Sequence[Sequence[Slices]]) -> Fragments:
    """The layout of stages 1 and 2, from what each rank says of each of its groups: `slices[dp_rank][group]`."""
    fragments: Fragments = {}
    for dp_rank, groups in enumerate(slices):
        for group, names in enumerate(groups):
            for name, (start, length) in names.items():
                fragments.setdefault(name, []).append(Fragment(dp_rank, group, start, length))
    return fragments


def each_cut(sizes: Mapping[str, int], group_sizes: Sequence[int], dp_size: int) -> Fragments:
    """The layout of stage 3: each parameter is padded to a multiple of `dp_size` and cut into equal pieces.

    `sizes` are the parameters' numbers of elements, in the order in which DeepSpeed flattened them; `group_sizes` are
    the lengths of a rank's flat tensors.

    Raises:
        ValueError: the parameters do not fill the flat tensors exactly.
    """
    places = _places(group_sizes)
    fragments: Fragments = {}
    at = 0
    for name, size in sizes.items():
        piece = -(-size // dp_size)
        group, first = next(((group, first) for group, first, stop in places if first <= at < stop), (-1, 0))
        if piece and (group < 0 or at + piece > first + group_sizes[group]):
            raise ValueError(f"{name} does not fit the flat tensors of {dp_size} ranks")
        # The last pieces hold the padding.
        lengths = (min(piece, max(0, size - dp_rank * piece)) for dp_rank in range(dp_size))
        fragments[name] = [Fragment(rank, group, at - first, length) for rank, length in enumerate(lengths) if length]
        at += piece
    if at != sum(group_sizes):
        raise ValueError(f"the parameters take {at} of the {sum(group_sizes)} elements in the flat tensors")
    return fragments


def _places(group_sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Each group's number, and its first and last-but-one place in the row of all groups."""

    def places() -> Iterator[tuple[int, int, int]]:
        first = 0
        for group, size in enumerate(group_sizes):
            yield group, first, first + size
            first += size

    return list(places())


# --- The files that the data-parallel ranks of one tensor-parallel rank save, by ZeRO stage -------------------------

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


# --- Reads DeepSpeed checkpoints of any ZeRO stage, data- and ten ---

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class CheckpointReader:
    """The parameters and Adam moments in a DeepSpeed checkpoint folder, merged over all ranks.

    `model` gives each parameter's whole shape and how it is split (it may lie on the meta device, and be of any
    tensor-parallel size).

    Raises:
        CheckpointError: a file is missing or damaged, is not what DeepSpeed writes, or does not fit `model`.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self._parameters = dict(model.named_parameters())
        files = self._optimizer_files()
        self.dp_size, self.tp_size = _grid(files)
        self._ranks = [
            saved_shards(folder, tp_rank, [files[dp_rank, tp_rank] for dp_rank in range(self.dp_size)])
            for tp_rank in range(self.tp_size)
        ]
        unknown = sorted(set(self.names) - set(self._parameters))
        if unknown:
            raise CheckpointError(
                f"{folder}: holds {unknown[0]} and {len(unknown) - 1} more that the model of its manifest has not; "
                "use the checkpoint with the method and base it was trained with"
            )

    @property
    def names(self) -> list[str]:
        """The parameters that trained."""
        return list(self._ranks[0].shapes)

    @property
    def frozen_names(self) -> list[str]:
        """Frozen parameters that the checkpoint holds all the same; usually none."""
        return [name for name in self._parameters if name in self._ranks[0].frozen_names]

    def read(self, name: str) -> Tensor:
        """The whole parameter `name`; trained ones in fp32, as the optimizer holds them."""
        if name in self._ranks[0].frozen_names:
            return self._merged(name, [rank.read_frozen(name) for rank in self._holders(name)])
        return self._trained(name, None)

    def read_moment(self, name: str, moment: Moment) -> Tensor:
        """Adam's first or second moment of the parameter `name`, whole, in fp32."""
        return self._trained(name, moment)

    def read_span(self, name: str, moment: Moment | None, tp_rank: int, tp_size: int, span: Span) -> Tensor:
        """A run of the flattened shard that `tp_rank` of `tp_size` holds of a trained parameter, or of its moment.

        Where the checkpoint is of the same tensor-parallel size, nothing else is read.
        """
        self._check_trained(name)
        if tp_size == self.tp_size:
            return self._ranks[tp_rank].read_span(name, moment, span)
        whole = self._trained(name, moment)
        return split(whole, partition_of(self._parameters[name]), tp_rank, tp_size).flatten()[slice(*span)]

    @property
    def adam_step(self) -> Tensor:
        """How many steps Adam has counted: a scalar, of the type that the optimizer counts in."""
        try:
            return self._ranks[0].adam_step
        except (KeyError, StopIteration, TypeError):
            raise CheckpointError(f"{self.folder}: holds no state of Adam; use another checkpoint") from None

    def _check_trained(self, name: str) -> None:
        if name not in self._ranks[0].shapes:
            raise CheckpointError(f"{self.folder}: does not hold {name}; it was trained with another method or base")

    def _trained(self, name: str, moment: Moment | None) -> Tensor:
        self._check_trained(name)
        return self._merged(name, [rank.read(name, moment) for rank in self._holders(name)])

    def _holders(self, name: str) -> list[SavedShards]:
        """The ranks whose shards make the whole: all, or one where each holds it all."""
        return self._ranks if partition_of(self._parameters[name]).dim is not None else self._ranks[:1]

    def _merged(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        parameter = self._parameters[name]
        partition, shape = partition_of(parameter), full_shape_of(parameter)
        whole = merge(shards, partition, shape[partition.dim or 0])
        if tuple(whole.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {tuple(whole.shape)}, expected {shape}; "
                "use the checkpoint with the method and base it was trained with"
            )
        return whole

    def _optimizer_files(self) -> dict[tuple[int, int], Path]:
        """The optimizer files by data- and tensor-parallel rank; a full grid of them."""
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such checkpoint folder")
        matches = ((_OPTIMIZER_FILE.fullmatch(file.name), file) for file in self.folder.iterdir())
        files = {(int(match[1]), int(match[2])): file for match, file in matches if match}
        if not files:
            raise CheckpointError(f"{self.folder}: holds no *_optim_states.pt; expected a ZeRO checkpoint of DeepSpeed")
        dp_size, tp_size = _grid(files)
        if missing := sorted(set(product(range(dp_size), range(tp_size))) - set(files)):
            dp_rank, tp_rank = missing[0]
            raise CheckpointError(
                f"{self.folder}: lacks the optimizer file of data-parallel rank {dp_rank}, tensor-parallel rank "
                f"{tp_rank} ({len(missing)} missing); copy the whole folder, from every node"
            )
        return files


def _grid(ranks: Collection[tuple[int, int]]) -> tuple[int, int]:
    """How many data-parallel and tensor-parallel ranks there are."""
    return 1 + max(dp_rank for dp_rank, _ in ranks), 1 + max(tp_rank for _, tp_rank in ranks)
