"""The file of each rank in a checkpoint, and a reader of all of them for any parallel layout.

A rank writes what its optimizer holds: for each trained parameter a contiguous part of the
parameter's flattened shard, in fp32, and the moments of that part: Adam's two, or Muon's one under
the name of Adam's first. The kind of file is the same for all ZeRO stages and for all data- and
tensor-parallel sizes. It is a safetensors file: nothing in it is executed, and only what is needed
is read.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import orjson
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipeline.errors import CheckpointError, faults_of_library
from pipeline.parallel.parameters import full_shape_of, partition_of
from pipeline.parallel.sharding import local_shape, merge, split

Stored = Literal["fp32", "exp_avg", "exp_avg_sq"]
"""The weights as the optimizer holds them, and its moments."""
Span = tuple[int, int]
"""The first element of a flattened tensor, and the one past the last."""
_LAYOUT = "layout"
_RANDOM = "random_state/"
_STEP = "adam_step"
_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_FLOAT_BYTES = 4


class RankState(NamedTuple):
    """What a rank saves.

    Attributes:
        first: for each parameter that the rank holds a part of, the first element of that part in
            the flattened shard.
        values: the parts [n], by `<parameter>/<stored>`.
        adam_step: how many steps Adam has counted, in the dtype that it counts in.
        random_state: the random state of the device `cpu` and, with a GPU, of `cuda`.
        adam_steps: in a run of several stages, the count of each parameter, because they differ.
            Without moments, a parameter has not trained yet, and its count is 0.
    """

    tp_rank: int
    tp_size: int
    first: dict[str, int]
    values: dict[str, Tensor]
    adam_step: Tensor
    random_state: dict[str, Tensor]
    adam_steps: Mapping[str, int] = MappingProxyType({})


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"


def write_rank_file(path: Path, state: RankState) -> None:
    """Writes a rank's state, and syncs the file to disk.

    The file is written tensor by tensor: `safetensors.torch.save_file` would first copy all of them
    from the GPU to the host.
    """
    tensors = dict(state.values)
    tensors[_STEP] = state.adam_step
    for device, random_state in state.random_state.items():
        tensors[_RANDOM + device] = random_state

    # The safetensors format: the header's length, the header as JSON, then all values in order.
    layout: dict[str, Any] = {
        "tp_rank": state.tp_rank,
        "tp_size": state.tp_size,
        "first": state.first,
    }
    if state.adam_steps:
        layout["adam_steps"] = dict(state.adam_steps)
    header: dict[str, Any] = {"__metadata__": {_LAYOUT: json.dumps(layout)}}
    begin = 0
    for name, tensor in tensors.items():
        # Offsets count from the end of the header, and values may have no gaps: safetensors refuses
        # a file with holes.
        end = begin + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            # In this machine's byte order, which is little-endian, as the format's is.
            file.write(tensor.cpu().numpy().data)
        # On the disk before a manifest says that it is.
        file.flush()
        os.fsync(file.fileno())


def read_random_state(folder: Path, rank: int) -> dict[str, Tensor]:
    """The random state of each device that `rank` saved."""
    path = rank_file(folder, rank)
    states: dict[str, Tensor] = {}
    with _faults_of(path), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  # safe_open gives no mapping
            if name.startswith(_RANDOM):
                states[name.removeprefix(_RANDOM)] = file.get_tensor(name)
    return states


class Index(NamedTuple):
    """Where everything is in the files of a checkpoint; read once, for all ranks.

    Attributes:
        parts: by parameter and tensor-parallel rank, the parts of the flattened shard in ascending
            order: int64 [parts, 4]. The columns are the part's first element, its length, the
            number of its file in `files`, and the byte of that file at which its weights begin.
        tp_size: the tensor-parallel size of the run that saved it.
        adam_steps: the count of each parameter, where they differ.
    """

    folder: Path
    files: list[Path]
    parts: dict[tuple[str, int], npt.NDArray[np.int64]]
    tp_size: int
    adam_step: Tensor
    adam_steps: dict[str, int]


def read_index(folder: Path) -> Index:
    """Reads the headers of all files of a checkpoint.

    Raises:
        CheckpointError: a file is damaged, or there is none.
    """
    files = sorted(folder.glob("rank_*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: holds no rank_*.safetensors; name the folder of a checkpoint"
        )
    # All ranks have counted the same steps, except where stages count by parameter (below).
    with _faults_of(files[0]), safe_open(files[0], "pt") as first_file:
        adam_step = first_file.get_tensor(_STEP)

    # Flat arrays of numbers: a checkpoint of a thousand ranks has millions of parts.
    found: dict[tuple[str, int], array[int]] = defaultdict(lambda: array("q"))
    adam_steps: dict[str, int] = {}
    tp_size = 1
    for number, path in enumerate(files):
        with _faults_of(path), path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            # A damaged length must not ask for more memory than the file has bytes.
            header = orjson.loads(file.read(min(header_bytes, path.stat().st_size - 8)))
            # The header is read here instead of by `safe_open`, which does not tell where values
            # lie in the file.
            layout = orjson.loads(header["__metadata__"][_LAYOUT])
            tp_rank = int(layout["tp_rank"])
            tp_size = int(layout["tp_size"])
            adam_steps.update(layout.get("adam_steps", {}))
            for name, first in layout["first"].items():
                weights = header[f"{name}/fp32"]
                [length] = weights["shape"]
                [begin, _] = weights["data_offsets"]
                place = 8 + header_bytes + begin
                found[name, tp_rank].extend((first, length, number, place))

    parts: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
    for key, numbers in found.items():
        table = np.frombuffer(numbers, dtype=np.int64).reshape(-1, 4)
        parts[key] = table[table[:, 0].argsort()]
    return Index(folder, files, parts, tp_size, adam_step, adam_steps)


class CheckpointReader:
    """The trained parameters and their moments in a checkpoint, merged over all ranks.

    A file is opened when a part of it is first read.

    Attributes:
        names: the parameters that the run's method trains, in the order of the model.
        tp_size: the tensor-parallel size of the run that saved the checkpoint.
    """

    def __init__(self, index: Index, model: nn.Module) -> None:
        """`model` gives each parameter's whole shape and how it is split.

        It may be on the meta device, and of any tensor-parallel size.

        Raises:
            CheckpointError: the checkpoint holds parameters that `model` does not have, or more of
                one than there is.
        """
        self.folder = index.folder
        self.tp_size = index.tp_size
        self._index = index
        # Memory-mapped: a thousand of them would be too many open files.
        self._file = lru_cache(None)(lambda number: np.memmap(index.files[number], np.uint8, "r"))
        self._parameters = dict(model.named_parameters())
        found = {name for name, _ in index.parts}
        unknown = sorted(found - set(self._parameters))
        if unknown:
            raise CheckpointError(
                f"{self.folder}: holds {unknown[0]} and {len(unknown) - 1} more, unknown to the "
                "model of its manifest; use the checkpoint with the method and base it was trained "
                "with"
            )
        self.names = [name for name in self._parameters if name in found]
        for (name, tp_rank), parts in index.parts.items():
            parameter = self._parameters[name]
            shard = local_shape(full_shape_of(parameter), partition_of(parameter), self.tp_size)
            # Files of two saves, mixed in one folder, would overlap.
            if parts[:, 1].sum() > prod(shard):
                raise CheckpointError(
                    f"{self.folder}: the files of tensor-parallel rank {tp_rank} hold more of "
                    f"{name} than there is; use another checkpoint"
                )

    def adam_step(self, name: str) -> Tensor:
        """How many steps Adam has counted of a parameter; 0 where it has not trained yet."""
        count = self._index.adam_step
        if name in self._index.adam_steps:
            count = torch.full_like(count, self._index.adam_steps[name])
        return count.clone()

    def read(self, name: str, stored: Stored = "fp32") -> Tensor:
        """The whole trained parameter `name`, or a moment of it, in fp32.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not hold all of it.
        """
        parameter = self._trained(name)
        partition = partition_of(parameter)
        shape = full_shape_of(parameter)
        shard_shape = local_shape(shape, partition, self.tp_size)
        # A parameter that is not split is whole on every rank: rank 0's copy is read.
        # A unit that several ranks hold is saved by each of them; `merge` takes the first one's.
        shard_count = 1 if partition.dim is None else self.tp_size
        shards = []
        for tp_rank in range(shard_count):
            shard = self._read(name, stored, tp_rank, (0, prod(shard_shape)))
            shards.append(shard.view(shard_shape))
        return merge(shards, partition, shape[partition.dim or 0])

    def read_span(
        self, name: str, stored: Stored, tp_rank: int, tp_size: int, span: Span
    ) -> Tensor:
        """Elements `span` of the flattened shard of a parameter, or of its moment.

        The shard is the one that `tp_rank` of `tp_size` holds. If the checkpoint has the same
        tensor-parallel size, nothing else is read.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not hold all of it.
        """
        partition = partition_of(self._trained(name))
        if tp_size == self.tp_size:
            return self._read(name, stored, tp_rank, span)
        # At another size the shard's elements lie in several of the saved shards.
        shard = split(self.read(name, stored), partition, tp_rank, tp_size)
        return shard.flatten()[slice(*span)]

    def _trained(self, name: str) -> nn.Parameter:
        if (name, 0) not in self._index.parts:
            raise CheckpointError(
                f"{self.folder}: does not hold {name}; it was trained with another method or base"
            )
        return self._parameters[name]

    def _read(self, name: str, stored: Stored, tp_rank: int, span: Span) -> Tensor:
        first_wanted, end_wanted = span
        # Parts follow each other without gaps or overlaps if the checkpoint is whole; the loop
        # below stops at the first gap.
        values = np.empty(end_wanted - first_wanted, np.float32)
        no_parts = np.zeros((0, 4), np.int64)
        parts = self._index.parts.get((name, tp_rank), no_parts)
        # The last part that begins at or before the first wanted element.
        number_of_first = np.searchsorted(parts[:, 0], first_wanted, "right") - 1
        # A moment follows the weights of the same part, and the second moment the first.
        stored_before = get_args(Stored).index(stored)
        at = first_wanted
        with _faults_of(self.folder):
            for first, length, file_number, place in parts[number_of_first:].tolist():
                end = min(end_wanted, first + length)
                if not first <= at < end:
                    break
                start = place + _FLOAT_BYTES * (stored_before * length + at - first)
                # Bytes of the memory map, seen as fp32: nothing is copied but what is wanted.
                part = self._file(file_number)[start : start + _FLOAT_BYTES * (end - at)]
                values[at - first_wanted : end - first_wanted] = part.view(np.float32)
                at = end
        if at < end_wanted:
            raise CheckpointError(
                f"{self.folder}: the files of tensor-parallel rank {tp_rank} do not make up "
                f"{name}; copy the whole folder, from every node, and use it with the method and "
                "base it was trained with"
            )
        return torch.from_numpy(values)


def _faults_of(path: Path) -> AbstractContextManager[None]:
    return faults_of_library(f"{path}: missing or damaged; use another checkpoint", CheckpointError)
