"""Files of tensors as `torch.save` writes them: synced to disk when written, and safe to read: no code in them runs."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import CheckpointError


class _Inert:
    """Replaces DeepSpeed's own classes when a file is read: takes the fields and does nothing with them."""

    def __init__(self, *_: object) -> None: ...


# What DeepSpeed's files hold besides tensors and plain containers. Nothing of DeepSpeed is imported: an enumeration is
# read as its number, a class as an object with the same fields.
_REPLACEMENTS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def write_torch_file(path: Path, value: Any) -> None:  # noqa: ANN401
    """Writes `value` and syncs the file to disk.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    file = _Writer(io.FileIO(path, "wb"))
    try:
        with file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
    except (RuntimeError, OSError) as error:
        # torch reports every failed write as a RuntimeError of its own.
        cause = error if isinstance(error, OSError) else file.error
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


def open_torch_file(path: Path) -> Any:  # noqa: ANN401
    """The content of `path`. Tensors stay on disk until they are used (mmap).

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than tensors, plain values and DeepSpeed's records.
    """
    try:
        with torch.serialization.safe_globals(_REPLACEMENTS):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete, use another one") from None
    except pickle.UnpicklingError as error:
        # torch's message is long; the user needs the name that was found, and that it did not run.
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            fault = f"names {found[1]}, which no checkpoint needs; nothing in it was run. Do not trust this file"
        else:
            fault = f"damaged, or not a checkpoint ({_first_line(error)}); use another one"
        raise CheckpointError(f"{path}: {fault}") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path}: damaged ({_first_line(error)}); use another checkpoint") from None


class _Writer(io.BufferedWriter):
    """A file that remembers why a write failed."""

    error: OSError | None = None

    def write(self, data: Any) -> int:  # noqa: ANN401
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
