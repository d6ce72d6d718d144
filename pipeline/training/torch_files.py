"""Files of tensors, as `torch.save` writes them: on the disk when written, and harmless when read."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from pipeline.errors import CheckpointError

_DEEPSPEED_RECORDS = [LossScaler, ZeroStageEnum, fragment_address]


def write_torch_file(path: Path, value: Any) -> None:  # noqa: ANN401
    """Writes `value` and waits until it is on the disk.

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
        # torch reports every failed write as an error of its own.
        cause = error if isinstance(error, OSError) else file.error
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


def read_torch_file(path: Path, map_location: Any = "cpu") -> Any:  # noqa: ANN401
    """What `path` holds: tensors, plain containers and a few of DeepSpeed's records.

    Raises:
        CheckpointError: it is missing or damaged, or holds anything else, which is not run.
    """
    try:
        with torch.serialization.safe_globals(_DEEPSPEED_RECORDS):
            return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete, use another one") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: holds more than tensors, and was not run: {_first_line(error)}") from None
    except (RuntimeError, EOFError) as error:
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
