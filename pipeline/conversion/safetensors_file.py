"""Writing a safetensors file one tensor at a time.

The library's own writer takes all tensors of a file at once, and copies them: for files of some GiB that is most of a
small machine's memory. The format is a length, a JSON header and the bytes, in the order of the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pipeline.conversion.export import PlannedTensor

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(
    path: Path, tensors: Sequence[PlannedTensor], dtype: torch.dtype, written: Callable[[int], object]
) -> None:
    """Writes `tensors` to `path` in `dtype`, holding one of them at a time; tells `written` of the bytes of each."""
    header = _header(tensors, dtype)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for planned in tensors:
            tensor = planned.make().to(dtype).contiguous()
            if tuple(tensor.shape) != planned.shape:
                raise AssertionError(f"{planned.name}: made {tuple(tensor.shape)}, planned {planned.shape}")
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            written(tensor.nbytes)


def _header(tensors: Sequence[PlannedTensor], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for planned in tensors:
        stop = at + planned.elements * dtype.itemsize
        entries[planned.name] = {"dtype": _DTYPE_NAMES[dtype], "shape": planned.shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
