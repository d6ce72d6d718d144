"""Saving while training goes on: what is to be written is copied to the host's memory, and a thread writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint.torch_files import write_torch_file


class HostCopies:
    """Files to be written, with copies of the tensors that go into them: the originals may change at once."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, Any]] = []

    def add(self, path: Path, value: Any) -> None:  # noqa: ANN401
        """Takes a copy of `value`, for the file `path`."""
        self._files.append((path, _on_host(value, {})))

    def write(self) -> None:
        """Writes the files, each with its content on the disk, and lets the copies go.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        while self._files:
            write_torch_file(*self._files.pop(0))


class Background:
    """One piece of work at a time, on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work`; what was begun before must be finished."""

        def guarded() -> None:
            try:
                work()
            except BaseException as fault:  # noqa: BLE001  it is raised where it can be heard
                self._fault = fault

        # A daemon: a run that fails elsewhere must not wait for a thread that waits for another rank.
        self._thread = threading.Thread(target=guarded, name="checkpoint writer", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the work, and raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault


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
