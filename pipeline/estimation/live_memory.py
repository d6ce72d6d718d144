"""The bytes that a computation holds, watched as its tensors come and go."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While it is entered: how many bytes of new storages live (`now`), and at most did (`peak`).

    A storage counts once, whatever views there are of it, from the operation that makes it until its last tensor is
    gone. Storages from before are not counted. Works alike on real, fake and meta tensors.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def restart_peak(self) -> None:
        """Forgets what lived at most so far."""
        self.peak = self.now

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
