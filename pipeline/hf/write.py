"""Writes a Hugging Face folder: weights file by file, code, and what it keeps of its
base's folder."""

from __future__ import annotations

import hashlib
import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.dynamic_module_utils import get_relative_import_files

from pipeline.errors import ConversionError, faults_of_library
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import write_json
from pipeline.files.publishing import write_text
from pipeline.hf.base_files import copy_base_files
from pipeline.hf.tokenizer_files import add_tokenizer_json
from pipeline.log import progress_bar
from pipeline.model.base_folder import INDEX_FILE
from pipeline.model.from_hf import RESIDUAL_KEY

FILE_BYTES = 2**30
"""The largest file of weights; one is in memory at a time."""
CONFIGURATION = "configuration_"
"""How the names of files of code begin that define a configuration, which transformers imports
first."""
_INTEGERS = {"I32": torch.int32, "I64": torch.int64}
"""The types of tables of ids, by their names in safetensors."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: its shape is known beforehand, `make` reads or computes its values.

    `dtype`: the type in which it is written; None: that of the export.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder to be written.

    Attributes:
        format: the name of its format.
        config: the contents of config.json.
        tensors: its tensors, in the order in which they are written.
        dtype: the type of the tensors that have none of their own.
        code: the Python files that the folder carries.
    """

    format: str
    config: Mapping[str, Any]
    tensors: Sequence[PlannedTensor]
    dtype: torch.dtype
    code: Sequence[Path] = ()

    @property
    def stored_scale(self) -> float | None:
        """The scale at which it stores added channels; None: there are none, or they are as
        trained."""
        residual = self.config.get(RESIDUAL_KEY)
        if residual is None:
            return None
        return float(residual["scale"])


def write_hf_folder(
    folder: Path, export: Export, base: Path, *, tokenizer: Path | None = None
) -> None:
    """Writes `export` into the existing `folder`, with the tokenizer of the folder `tokenizer`, by
    default `base`.

    Raises:
        BaseModelError: a file of the base cannot be read, or links out of its folder.
    """
    write_tensors(folder, export.tensors, export.dtype)
    copy_code(folder, export.code)
    copy_base_files(folder, base, tokenizer or base)
    add_tokenizer_json(folder, tokenizer or base)
    # Last: a base's own files never replace it.
    write_json(folder / "config.json", export.config)


def write_tensors(folder: Path, tensors: Sequence[PlannedTensor], dtype: torch.dtype) -> None:
    """Writes files of weights of FILE_BYTES, or of one larger tensor, and their index into
    `folder`.
    """

    def size_of(tensor: PlannedTensor) -> int:
        return prod(tensor.shape) * (tensor.dtype or dtype).itemsize

    planned = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        planned,
        get_storage_size=size_of,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    total_size = split.metadata["total_size"]
    with progress_bar("writing", total_size, "B") as bar:
        for file_name, names in split.filename_to_tensors.items():
            # A file is in memory as a whole: safetensors writes its header, with all offsets,
            # first.
            made: dict[str, Tensor] = {}
            for name in names:
                made[name] = _made(planned[name], dtype)
                bar.update(made[name].nbytes)
            save_file(made, folder / file_name, {"format": "pt"})
    if split.is_sharded:
        metadata = {
            "total_parameters": sum(prod(tensor.shape) for tensor in tensors),
            "total_size": total_size,
        }
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX_FILE, index)


def _made(planned: PlannedTensor, dtype: torch.dtype) -> Tensor:
    """The values of a tensor, in its own type or `dtype`."""
    values = planned.make().to(planned.dtype or dtype)
    # Of its own memory: parts of a base's fused matrix share theirs, which safetensors refuses.
    values = values.clone(memory_format=torch.contiguous_format)
    assert tuple(values.shape) == planned.shape, planned.name
    return values


def stored_tensors(folder: Path) -> dict[str, PlannedTensor]:
    """The tensors of the files of weights in `folder`, by name, each read when it is made.

    Raises:
        ConversionError: a file is damaged; so does `make`.
    """
    found: dict[str, PlannedTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with (
            faults_of_library(f"{path}: damaged", ConversionError),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                part = file.get_slice(name)
                dtype: torch.dtype | None = None
                if name.startswith("token_gate."):
                    dtype = torch.float32  # 16 bits would change decisions
                elif part.get_dtype() in _INTEGERS:
                    dtype = _INTEGERS[part.get_dtype()]  # a table of ids
                shape = tuple(part.get_shape())
                make = partial(_read_tensor, path, name)
                found[name] = PlannedTensor(name, shape, make, dtype)
    return found


def _read_tensor(path: Path, name: str) -> Tensor:
    with (
        faults_of_library(f"{path}: damaged", ConversionError),
        safe_open(path, framework="pt") as file,
    ):
        tensor: Tensor = file.get_tensor(name)
        return tensor


def dtype_name(dtype: torch.dtype) -> str:
    """A type as config.json spells it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def code_files(model: type) -> list[Path]:
    """The file of a model's class and those that it imports, which its folder carries beside the
    weights.
    """
    file = Path(inspect.getfile(model))
    imported = set(get_relative_import_files(file))
    return [file, *(Path(name) for name in sorted(imported))]


def copy_code(folder: Path, files: Sequence[Path]) -> None:
    """Copies the Python files of an export into `folder`; their configuration files end with a hash
    of them all.

    transformers takes a model's class by that of its configuration, which it knows by the contents
    of that file alone. Two folders with other code beside an equal configuration file would both
    run the code that is loaded first.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file_hash(file)}\n".encode())
        shutil.copy(file, folder)
    for file in files:
        if file.name.startswith(CONFIGURATION):
            path = folder / file.name
            code = path.read_text(encoding="utf-8")
            write_text(path, f"{code}# The code of this folder: {digest.hexdigest()}\n")
