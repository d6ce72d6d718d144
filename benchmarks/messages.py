"""Records the collectives that a computation calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Messages(TorchDispatchMode):
    """Records every collective called within the block: name, payload in bytes, group size."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int, int]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation.namespace == "c10d":
            tensors = [tensor for argument in args for tensor in _tensors(argument)]
            group = next(
                dist.ProcessGroup.unbox(argument)
                for argument in args
                if isinstance(argument, torch.ScriptObject)
            )
            longest = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
            self.sent.append((operation._opname.strip("_"), longest, group.size()))
        return operation(*args, **(kwargs or {}))


def _tensors(argument: Any) -> Iterable[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _tensors(item)
