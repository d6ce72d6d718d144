"""Reads DeepSpeed checkpoints of any ZeRO stage, data- and tensor-parallel size, one whole tensor at a time.

Needs neither DeepSpeed nor a process group, and executes nothing in the files. The files are memory-mapped: at most one
parameter is held at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.checkpoint.torch_files import open_torch_file
from pipeline.errors import CheckpointError
from pipeline.parallel.sharding import full_shape_of, merge, partition_of, split

Moment = Literal["exp_avg", "exp_avg_sq"]
Span = tuple[int, int]
"""The first element of a flattened tensor, and the one past the last."""
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MALFORMED = (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError)


class CheckpointReader:
    """The trained parameters and their Adam moments in a DeepSpeed checkpoint folder, merged over all ranks.

    `model` gives each parameter's whole shape and how it is split (it may be on the meta device, and of any
    tensor-parallel size).

    Raises:
        CheckpointError: a file is missing or damaged, is not what DeepSpeed writes, or does not fit `model`.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self._parameters = dict(model.named_parameters())
        files = _optimizer_files(folder)
        self.tp_size, self.dp_size = len(files), len(files[0])
        self._shards = [_open_shards(folder, tp_rank, of_rank) for tp_rank, of_rank in enumerate(files)]
        if unknown := sorted(set(self.names) - set(self._parameters)):
            raise CheckpointError(
                f"{folder}: holds {unknown[0]} and {len(unknown) - 1} more, unknown to the model of its manifest; "
                "use the checkpoint with the method and base it was trained with"
            )

    @property
    def names(self) -> list[str]:
        """The parameters that trained."""
        return list(self._shards[0].shapes)

    def read(self, name: str, moment: Moment | None = None) -> Tensor:
        """The whole trained parameter `name`, or a moment of it, in fp32 as the optimizer holds it.

        Raises:
            CheckpointError: the checkpoint does not hold it, or in another shape than the model's.
        """
        self._check_trained(name)
        partition, shape = partition_of(self._parameters[name]), full_shape_of(self._parameters[name])
        # A parameter that is not split is whole on every rank: rank 0's is read.
        ranks = self._shards if partition.dim is not None else self._shards[:1]
        shards = [rank.read(name, moment).view(rank.shapes[name]) for rank in ranks]
        whole = merge(shards, partition, shape[partition.dim or 0])
        if tuple(whole.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {tuple(whole.shape)}, expected {shape}; "
                "use the checkpoint with the method and base it was trained with"
            )
        return whole

    def read_span(self, name: str, moment: Moment | None, tp_rank: int, tp_size: int, span: Span) -> Tensor:
        """Elements `span` of the flattened shard that `tp_rank` of `tp_size` holds of a parameter, or of its moment.

        Reads nothing else if the checkpoint has the same tensor-parallel size. Raises as `read` does.
        """
        if tp_size == self.tp_size:
            self._check_trained(name)
            return self._shards[tp_rank].read(name, moment, span)
        whole = self.read(name, moment)
        return split(whole, partition_of(self._parameters[name]), tp_rank, tp_size).flatten()[slice(*span)]

    @property
    def adam_step(self) -> Tensor:
        """How many steps Adam has counted: a scalar, of the type that the optimizer counts in."""
        try:
            return torch.as_tensor(next(iter(self._shards[0].states[0].values()))["step"])
        except (KeyError, StopIteration, TypeError):
            raise CheckpointError(f"{self.folder}: holds no state of Adam; use another checkpoint") from None

    def _check_trained(self, name: str) -> None:
        if name not in self._shards[0].shapes:
            raise CheckpointError(f"{self.folder}: does not hold {name}; it was trained with another method or base")


def _optimizer_files(folder: Path) -> list[list[Path]]:
    """The optimizer files `[tp_rank][dp_rank]`: a full grid."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    matches = ((_OPTIMIZER_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    files = {(int(match[2]), int(match[1])): file for match, file in matches if match}
    if not files:
        raise CheckpointError(f"{folder}: holds no *_optim_states.pt; expected a ZeRO checkpoint of DeepSpeed")
    tp_size, dp_size = (1 + max(ranks) for ranks in zip(*files, strict=True))
    if missing := sorted(set(product(range(tp_size), range(dp_size))) - set(files)):
        tp_rank, dp_rank = missing[0]
        raise CheckpointError(
            f"{folder}: lacks the optimizer file of data-parallel rank {dp_rank}, tensor-parallel rank {tp_rank} "
            f"({len(missing)} missing); copy the whole folder, from every node"
        )
    return [[files[tp_rank, dp_rank] for dp_rank in range(dp_size)] for tp_rank in range(tp_size)]


class _Fragment(NamedTuple):
    """`length` elements from `start` on in flat tensor number `group` of data-parallel rank `dp_rank`."""

    dp_rank: int
    group: int
    start: int
    length: int


Fragments = dict[str, list[_Fragment]]
"""For every parameter the fragments that make up its flattened values, in order.

DeepSpeed flattens the parameters that train and cuts them over the data-parallel ranks. Stages 1 and 2 join all
parameters of a group first and cut once; stage 3 cuts every parameter in equal pieces.
"""


@dataclass(frozen=True)
class _Shards:
    """One tensor-parallel rank's shards of all trained parameters, as its data-parallel ranks saved them.

    Attributes:
        shapes: of the shards.
        fragments: where their elements are.
        weights: the flat fp32 tensors, `[dp_rank][group]`.
        states: Adam's state of each flat tensor, `[dp_rank][group]`.
    """

    shapes: dict[str, tuple[int, ...]]
    fragments: Fragments
    weights: list[Sequence[Tensor]]
    states: list[Mapping[int, Mapping[str, Tensor]]]

    def read(self, name: str, moment: Moment | None, span: Span | None = None) -> Tensor:
        """Elements `span` (default: all) of a flattened shard, or of its moment."""
        first, stop = span or (0, prod(self.shapes[name]))
        pieces = []
        for rank, group, start, length in self.fragments[name]:
            begin, end = max(first, 0), min(stop, length)
            if begin < end:
                flat = self.weights[rank][group] if moment is None else self.states[rank][group][moment]
                pieces.append(flat.narrow(0, start + begin, end - begin))
            first, stop = first - length, stop - length
        return torch.cat(pieces)


def _open_shards(folder: Path, tp_rank: int, optimizer_files: Sequence[Path]) -> _Shards:
    """Opens the files of tensor-parallel rank `tp_rank`; `optimizer_files` are those of its data-parallel ranks.

    Raises:
        CheckpointError: a file is missing, damaged, or not laid out as DeepSpeed does.
    """
    try:
        optimizers = [open_torch_file(file)["optimizer_state_dict"] for file in optimizer_files]
        # DeepSpeed's bf16 optimizer, which it uses for stage 1 with fp32 gradients, does not name its stage.
        is_zero3 = int(optimizers[0].get("zero_stage", 1)) == 3
        # Under ZeRO-3 every data-parallel rank writes this file, with the same shapes.
        model = open_torch_file(folder / f"{'zero_pp_rank_0_' * is_zero3}mp_rank_{tp_rank:02d}_model_states.pt")
        shapes = {name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()}
        sizes = {name: prod(shape) for name, shape in shapes.items()}
        if is_zero3:
            weights = [rank["fp32_flat_groups"] for rank in optimizers]
            states = [rank["optimizer_state_dict"]["state"] for rank in optimizers]
            fragments = stage_3_fragments(sizes, [flat.numel() for flat in weights[0]], len(optimizers))
        else:
            weights = [rank["single_partition_of_fp32_groups"] for rank in optimizers]
            states = [rank["base_optimizer_state"]["state"] for rank in optimizers]
            fragments = stage_1_2_fragments([rank["param_slice_mappings"] for rank in optimizers])
        for name, size in sizes.items():
            if sum(fragment.length for fragment in fragments[name]) != size:
                raise ValueError(f"the fragments of {name} do not make up the shape {shapes[name]}")
        return _Shards(shapes, fragments, weights, states)
    except _MALFORMED as error:
        raise CheckpointError(
            f"{folder}: tensor-parallel rank {tp_rank} is not laid out as DeepSpeed's ZeRO 1, 2 or 3 "
            f"({type(error).__name__}: {error}); use another checkpoint"
        ) from None


def stage_1_2_fragments(slices: Sequence[Sequence[Mapping[str, Any]]]) -> Fragments:
    """Stages 1 and 2: from the `start` and `numel` of each parameter in every flat tensor, `slices[dp_rank][group]`."""
    fragments: Fragments = {}
    for dp_rank, groups in enumerate(slices):
        for group, names in enumerate(groups):
            for name, part in names.items():
                fragments.setdefault(name, []).append(_Fragment(dp_rank, group, part.start, part.numel))
    return fragments


def stage_3_fragments(sizes: Mapping[str, int], group_sizes: Sequence[int], dp_size: int) -> Fragments:
    """Stage 3: each parameter is padded to a multiple of `dp_size` and cut into equal pieces.

    `sizes` are the parameters' numbers of elements, in the order in which DeepSpeed flattened them; `group_sizes` are
    the lengths of a rank's flat tensors.

    Raises:
        ValueError: the parameters do not fill the flat tensors exactly.
    """
    fragments: Fragments = {}
    group, start = 0, 0
    for name, size in sizes.items():
        piece = -(-size // dp_size)
        while group < len(group_sizes) and start == group_sizes[group]:
            group, start = group + 1, 0
        if piece and (group == len(group_sizes) or start + piece > group_sizes[group]):
            raise ValueError(f"{name} does not fit the flat tensors of {dp_size} ranks")
        # The last pieces hold the padding.
        lengths = (min(piece, max(0, size - dp_rank * piece)) for dp_rank in range(dp_size))
        fragments[name] = [_Fragment(rank, group, start, length) for rank, length in enumerate(lengths) if length]
        start += piece
    if (filled := sum(group_sizes[:group]) + start) != sum(group_sizes):
        raise ValueError(f"the parameters fill {filled} of the {sum(group_sizes)} elements in the flat tensors")
    return fragments
