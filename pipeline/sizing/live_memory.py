"""Counts the memory of live tensors, also of tensors without data (torch's meta device)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.sizing.meta_device import value_without_data

_sizes_of_results: dict[object, tuple[Any, ...] | None] = {}
"""Shape, stride and type of the results of operations, by the operation and its arguments; None
for results that must be computed each time."""


class KnownSizes(TorchDispatchMode):
    """While it is entered, results on the meta device are made from the sizes of earlier results.

    torch derives the sizes of most results on the meta device in Python, which takes most of the
    time of a pass. The layers of a model repeat the same operations on the same sizes.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: the compiler in every call would take a third of the time."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return value_without_data(args[0])
        # The default type is a part of the key, because factories such as `zeros` read it.
        key = operation, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items()))
        sizes = _sizes_of_results.get(key)
        if sizes is not None:
            shape, stride, dtype = sizes
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = operation(*args, **kwargs)
        if key not in _sizes_of_results:
            # Views, results in place and several results are computed each time.
            _sizes_of_results[key] = None
            if _is_new_meta_tensor(result, (args, kwargs)):
                _sizes_of_results[key] = _sizes(result)
        return result


def _key(value: Any) -> object:
    """The properties of an argument on which the sizes of a result depend.

    The type of a number is one of them, because 1 and 1.0 are equal in Python.
    """
    if isinstance(value, Tensor):
        return value.device, *_sizes(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_new_meta_tensor(result: Any, given: Any) -> bool:
    """Whether `result` is one tensor with a storage of its own, as large as its elements."""
    if not isinstance(result, Tensor) or not result.is_meta:
        return False
    storage = result.untyped_storage()
    if storage.nbytes() != result.nbytes:
        return False
    for tensor in tree_leaves(given):
        if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata == storage._cdata:
            return False
    return True


class LiveMemory(KnownSizes):
    """Counts the memory of tensors that are made while it is entered: real, fake or meta tensors.

    A storage counts once, however many views it has, from the operation that creates it until its
    last tensor is freed. The storages of the tensors `known` do not count.

    Attributes:
        now: bytes of the storages that are alive.
        peak: the largest value of `now`.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        # Most results are one tensor, and tree_leaves is slow.
        tensors = [result] if isinstance(result, Tensor) else tree_leaves(result)
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        # torch keeps one Python object for each storage. It lives as long as any tensor does that
        # has this storage, so that its end is the end of the storage.
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
