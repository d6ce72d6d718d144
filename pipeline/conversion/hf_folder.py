"""Writing a Hugging Face folder: weights in files of a few GiB with their index, configuration, tokenizer, licences."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.conversion.export import Export, PlannedTensor
from pipeline.conversion.safetensors_file import write_safetensors
from pipeline.files import write_json, write_text
from pipeline.model.base_folder import INDEX_FILE
from pipeline.progress_bar import progress_bar

FILE_BYTES = 4 * 2**30
# Fixed names: nothing that a file says decides where we write.
_FROM_BASE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)


def write_hf_folder(folder: Path, export: Export, base: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Fills the existing `folder`. One tensor is held at a time."""
    files: Sequence[Sequence[PlannedTensor]] = [export.tensors]
    if export.files.in_parts:
        files = shards(export.tensors, file_bytes // export.dtype.itemsize)
    names = [export.files.weights]
    if len(files) > 1:
        names = [_shard_name(index, len(files)) for index in range(len(files))]
    size = sum(tensor.elements for tensor in export.tensors) * export.dtype.itemsize
    with progress_bar("writing", size, "B") as bar:
        for name, tensors in zip(names, files, strict=True):
            write_safetensors(folder / name, tensors, export.dtype, bar.update)
    if len(files) > 1:
        weight_map = {tensor.name: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        total = {"total_parameters": size // export.dtype.itemsize, "total_size": size}
        write_json(folder / INDEX_FILE, {"metadata": total, "weight_map": weight_map})
    for name, text in export.code.items():
        write_text(folder / name, text)
    for name in _FROM_BASE:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    write_json(folder / export.files.config, export.config)


def shards(tensors: Sequence[PlannedTensor], elements: int) -> list[list[PlannedTensor]]:
    """Runs of `tensors` of at most `elements` each; a larger tensor has a run of its own."""
    runs: list[list[PlannedTensor]] = []
    room = 0
    for tensor in tensors:
        if not runs or tensor.elements > room:
            runs.append([])
            room = elements
        runs[-1].append(tensor)
        room -= tensor.elements
    return runs


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
