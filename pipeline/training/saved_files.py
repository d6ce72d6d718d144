"""The files of tensors that a rank puts into a checkpoint: written at once, or from copies while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pipeline.checkpoint.torch_files import write_torch_file


class Files(Protocol):
    """What takes files of tensors, to be on the disk when `write` has returned.

    Attributes:
        bytes: of the tensors that were added.
        paths: of the files.
    """

    bytes: int
    paths: list[Path]

    def add(self, path: Path, value: Any) -> None:  # noqa: ANN401
        """Takes `value`, for the file `path`."""

    def write(self) -> None:
        """Writes what was added.

        Raises:
            OSError: the disk is full, or cannot be written.
        """


class HostCopies:
    """Files to be written, with copies of the tensors that go into them: the originals may change at once."""

    def __init__(self) -> None:
        self.bytes = 0
        self.paths: list[Path] = []
        self._files: list[tuple[Path, Any]] = []

    def add(self, path: Path, value: Any) -> None:  # noqa: ANN401
        """Takes a copy of `value`."""
        copy = _on_host(value, {})
        self._files.append((path, copy))
        self.paths.append(path)
        self.bytes += _bytes(copy)

    def write(self) -> None:
        """Writes the files, each with its content on the disk, and lets the copies go."""
        while self._files:
            write_torch_file(*self._files.pop(0))


class DirectFiles:
    """Files written as they are added. The first fault is raised by `write`: DeepSpeed could not go on from one."""

    def __init__(self) -> None:
        self.bytes = 0
        self.paths: list[Path] = []
        self._fault: OSError | None = None

    def add(self, path: Path, value: Any) -> None:  # noqa: ANN401
        """Writes `value`, unless a file could not be written."""
        self.paths.append(path)
        self.bytes += _bytes(value)
        if self._fault is None:
            try:
                write_torch_file(path, value)
            except OSError as fault:
                self._fault = fault

    def write(self) -> None:
        """All is written, or was not."""
        if self._fault is not None:
            raise self._fault


def _on_host(value: Any, copied: dict[tuple[Any, ...], Tensor]) -> Any:  # noqa: ANN401
    """`value` with copies of its tensors; what is one tensor under two names (`copied`) stays one."""
    if isinstance(value, Tensor):
        key = (value.data_ptr(), value.device, value.dtype, tuple(value.shape), value.stride())
        if key not in copied or value.numel() == 0:
            copied[key] = value.detach().to("cpu", copy=True)
        return copied[key]
    if isinstance(value, dict):
        made = {name: _on_host(one, copied) for name, one in value.items()}
        return made if type(value) is dict else type(value)(made)
    if type(value) in (list, tuple):
        return type(value)(_on_host(one, copied) for one in value)
    return value


def _bytes(value: Any) -> int:  # noqa: ANN401
    """What the tensors in `value` weigh, each memory once, however many of them lie in it."""
    storages = (tensor.untyped_storage() for tensor in _tensors(value))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> list[Tensor]:  # noqa: ANN401
    """The tensors in `value`, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return [tensor for one in inner for tensor in _tensors(one)]
