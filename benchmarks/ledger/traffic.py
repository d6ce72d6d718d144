"""What one operation of torch reads and writes: which storages, and how many bytes of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

WRITTEN_ALONE = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
"""Operations that change a tensor without reading it."""
INDEXED = {"embedding", "gather", "index", "index_select"}
"""Operations that read as much of their first tensor as they write."""
INDEXED_IN_PLACE = {"scatter_add_", "scatter_", "index_add_", "index_put_", "index_copy_"}
"""Operations that change as much of their first tensor as their last one has."""
WITHOUT_KERNEL = {
    "_unsafe_view",
    "_version",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
}
"""Operations, beside views, that start no kernel."""


class Access(NamedTuple):
    """A part of a storage that an operation reads or writes.

    Attributes:
        storage: the storage's number; no two storages of a step have the same.
        offset: the part's first byte.
        bytes: how many bytes of it are touched.
    """

    storage: int
    offset: int
    bytes: int


def total_bytes(accesses: Iterable[Access]) -> int:
    """The bytes of these parts; the same part counts once."""
    parts: dict[tuple[int, int], int] = {}
    for access in accesses:
        key = access.storage, access.offset
        parts[key] = max(parts.get(key, 0), access.bytes)
    return sum(parts.values())


def starts_no_kernel(operation: Any) -> bool:
    """Whether an operation only makes another view, or memory without values."""
    return operation.is_view or operation.overloadpacket.__name__ in WITHOUT_KERNEL


def touched_tensors(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
    """The tensors that an operation reads, and those that it writes, each with its bytes."""
    name = operation.overloadpacket.__name__
    changed: list[Tensor] = []
    read: list[Tensor] = []
    for tensor, is_changed in _given_tensors(operation, args, kwargs):
        if is_changed:
            changed.append(tensor)
        else:
            read.append(tensor)
    made: list[Tensor] = []
    for tensor in _tensors(result):
        if not any(tensor is given for given in changed):
            made.append(tensor)

    reads = [(tensor, distinct_bytes(tensor)) for tensor in read]
    writes = [(tensor, distinct_bytes(tensor)) for tensor in (*changed, *made)]
    if name in INDEXED and reads and made:
        reads[0] = (read[0], distinct_bytes(made[0]))
    if name in INDEXED_IN_PLACE and changed and read:
        part = distinct_bytes(read[-1])
        writes = [(changed[0], part)]
    is_out = any(argument.is_out for argument in operation._schema.arguments)
    if name not in WRITTEN_ALONE and not is_out:
        reads += writes[: len(changed)]
    return reads, writes


def distinct_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements; those of an expanded dimension count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            elements *= size
    return elements * tensor.element_size()


def _given_tensors(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors among the arguments, and whether the operation changes each."""
    for position, argument in enumerate(operation._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            value = args[position]
        else:
            value = kwargs.get(argument.name)
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, is_changed


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a value on the device, those of lists too; numbers of the host are none."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)


def element_offset(tensor: Tensor) -> int:
    """Where a tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset() * tensor.element_size())


def copies_addend(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether CUDA copies the addend of a product into the result first.

    `addmm` does so for a matrix of its own (torch's `aten/src/ATen/native/cuda/Blas.cpp`), and the
    product then adds onto the copy. A bias is added in the product's kernel. Onto `out`, nothing is
    copied if that is the addend.
    """
    if operation.overloadpacket is not torch.ops.aten.addmm:
        return False
    addend = args[0]
    return addend.dim() == 2 and kwargs.get("out") is not addend


def is_product(operation: Any) -> bool:
    """Whether an operation is a product of matrices."""
    return operation.overloadpacket in (
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten.baddbmm,
    )
