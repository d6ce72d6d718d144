"""The file of each rank in a checkpoint, and a reader of all of them for any parallel layout.

A rank writes what its optimizer holds: of each trained parameter a run of its flattened shard, in
fp32, with its
moments: Adam's two, or Muon's one under the name of Adam's first. All ZeRO stages, data- and
    tensor-parallel sizes give
the same kind of file. It is a safetensors file: nothing in it is executed, and only what is needed
is read.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from contextlib import AbstractContextManager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import orjson
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipeline.errors import CheckpointError, faults_of_library
from pipeline.parallel.sharding import full_shape_of, local_shape, merge, partition_of, split

Kind = Literal["fp32", "exp_avg", "exp_avg_sq"]
"""The weights as the optimizer holds them, and its moments."""
Span = tuple[int, int]
"""The first element of a flattened tensor, and the one past the last."""
_LAYOUT = "layout"
_RANDOM = "random_state/"
_STEP = "adam_step"
_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}


class RankState(NamedTuple):
    """What a rank saves.

    Attributes: first: of each parameter that it holds a part of, the first element of that part in
    the flattened shard. values: the parts [n], by `<parameter>/<kind>`. adam_step: how many steps
    Adam has counted, of the type that it counts in. random_state: of the device `cpu` and, with a
    GPU, `cuda`.
    """

    tp_rank: int
    tp_size: int
    first: dict[str, int]
    values: dict[str, Tensor]
    adam_step: Tensor
    random_state: dict[str, Tensor]


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"


def write_rank_file(path: Path, state: RankState) -> None:
    """Writes a rank's state, and syncs the file to disk.

    Tensor by tensor: `safetensors.torch.save_file` would copy all of them from the GPU first.
    """
    tensors = state.values | {_STEP: state.adam_step}
    tensors |= {_RANDOM + device: value for device, value in state.random_state.items()}
    layout = json.dumps({"tp_rank": state.tp_rank, "tp_size": state.tp_size, "first": state.first})
    header: dict[str, Any] = {"__metadata__": {_LAYOUT: layout}}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": offsets,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.cpu().numpy().data)
        file.flush()
        os.fsync(file.fileno())


def read_random_state(folder: Path, rank: int) -> dict[str, Tensor]:
    """The random state of each device that `rank` saved."""
    path = rank_file(folder, rank)
    with _faults_of(path), safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.startswith(_RANDOM)]  # noqa: SIM118  # no mapping
        return {name.removeprefix(_RANDOM): file.get_tensor(name) for name in names}


class Index(NamedTuple):
    """Where everything is in the files of a checkpoint; read once, for all ranks.

    Attributes: parts: by parameter and tensor-parallel rank, the parts of the flattened shard in
    their order. Of each: its first element, its length, the number of its file, and where its
    values begin there: int64 [parts, 4]. tp_size: the tensor-parallel size at which it was saved.
    """

    folder: Path
    files: list[Path]
    parts: dict[tuple[str, int], npt.NDArray[np.int64]]
    tp_size: int
    adam_step: Tensor


def read_index(folder: Path) -> Index:
    """Reads the headers of all files of a checkpoint. Raises CheckpointError if one is damaged, or
    there is none.
    """
    files = sorted(folder.glob("rank_*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: holds no rank_*.safetensors; name the folder of a checkpoint"
        )
    found: dict[tuple[str, int], array[int]] = defaultdict(lambda: array("q"))
    with _faults_of(files[0]), safe_open(files[0], "pt") as first_file:
        adam_step = first_file.get_tensor(_STEP)
    for number, path in enumerate(files):
        with _faults_of(path), path.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            header = orjson.loads(file.read(min(data, path.stat().st_size) - 8))
            layout = orjson.loads(header["__metadata__"][_LAYOUT])
            tp_rank, tp_size = int(layout["tp_rank"]), int(layout["tp_size"])
            for name, first in layout["first"].items():
                written = header[f"{name}/fp32"]
                [length], [begin, _] = written["shape"], written["data_offsets"]
                found[name, tp_rank].extend((first, length, number, data + begin))
    tables = {key: np.frombuffer(own, dtype=np.int64).reshape(-1, 4) for key, own in found.items()}
    parts = {key: table[table[:, 0].argsort()] for key, table in tables.items()}
    return Index(folder, files, parts, tp_size, adam_step)


class CheckpointReader:
    """The trained parameters and their Adam moments in a checkpoint, merged over all ranks.

    `model` gives each parameter's whole shape and how it is split (it may be on the meta device,
    and of any tensor-parallel size). A file is opened when a part of it is read. `names` are the
    parameters that trained. Raises CheckpointError where the checkpoint is damaged, lacks
    something, or does not fit `model`.
    """

    def __init__(self, index: Index, model: nn.Module) -> None:
        self.folder, self.tp_size, self.adam_step = index.folder, index.tp_size, index.adam_step
        self._index = index
        # Mapped, so that a thousand of them are no open files.
        self._file = lru_cache(None)(lambda number: np.memmap(index.files[number], np.uint8, "r"))
        self._parameters = dict(model.named_parameters())
        found = {name for name, _ in index.parts}
        if unknown := sorted(found - set(self._parameters)):
            raise CheckpointError(
                f"{self.folder}: holds {unknown[0]} and {len(unknown) - 1} more, unknown to the "
                "model of its manifest; "
                "use the checkpoint with the method and base it was trained with"
            )
        self.names = [name for name in self._parameters if name in found]
        for (name, tp_rank), parts in index.parts.items():
            parameter = self._parameters[name]
            shard = local_shape(full_shape_of(parameter), partition_of(parameter), self.tp_size)
            if parts[:, 1].sum() > prod(shard):
                raise CheckpointError(
                    f"{self.folder}: the files of tensor-parallel rank {tp_rank} hold more of "
                    f"{name} than there is; "
                    "use another checkpoint"
                )

    def read(self, name: str, kind: Kind = "fp32") -> Tensor:
        """The whole trained parameter `name`, or a moment of it, in fp32."""
        parameter = self._trained(name)
        partition, shape = partition_of(parameter), full_shape_of(parameter)
        shard = local_shape(shape, partition, self.tp_size)
        # A parameter that is not split is whole on every rank: rank 0's is read.
        ranks = range(self.tp_size if partition.dim is not None else 1)
        shards = [
            self._read(name, kind, tp_rank, (0, prod(shard))).view(shard) for tp_rank in ranks
        ]
        return merge(shards, partition, shape[partition.dim or 0])

    def read_span(self, name: str, kind: Kind, tp_rank: int, tp_size: int, span: Span) -> Tensor:
        """Elements `span` of the flattened shard that `tp_rank` of `tp_size` holds of a parameter,
        or of its moment.

        Reads nothing else if the checkpoint has the same tensor-parallel size.
        """
        partition = partition_of(self._trained(name))
        if tp_size == self.tp_size:
            return self._read(name, kind, tp_rank, span)
        return split(self.read(name, kind), partition, tp_rank, tp_size).flatten()[slice(*span)]

    def _trained(self, name: str) -> nn.Parameter:
        if (name, 0) not in self._index.parts:
            raise CheckpointError(
                f"{self.folder}: does not hold {name}; it was trained with another method or base"
            )
        return self._parameters[name]

    def _read(self, name: str, kind: Kind, tp_rank: int, span: Span) -> Tensor:
        values = np.empty(span[1] - span[0], np.float32)
        parts, at = self._index.parts.get((name, tp_rank), np.zeros((0, 4), np.int64)), span[0]
        with _faults_of(self.folder):
            for first, length, number, place in parts[
                np.searchsorted(parts[:, 0], at, "right") - 1 :
            ].tolist():
                end = min(span[1], first + length)
                if not first <= at < end:
                    break
                # A moment follows the weights, and the second one the first.
                start = place + 4 * (get_args(Kind).index(kind) * length + at - first)
                stored = self._file(number)[start : start + 4 * (end - at)]
                values[at - span[0] : end - span[0]] = stored.view(np.float32)
                at = end
        if at < span[1]:
            raise CheckpointError(
                f"{self.folder}: the files of tensor-parallel rank {tp_rank} do not make up "
                f"{name}; copy the whole "
                "folder, from every node, and use it with the method and base it was trained with"
            )
        return torch.from_numpy(values)


def _faults_of(path: Path) -> AbstractContextManager[None]:
    return faults_of_library(f"{path}: missing or damaged; use another checkpoint", CheckpointError)
