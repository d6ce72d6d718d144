"""The operations of a step in their order, with what each reads, writes and computes.

The step runs on torch's meta device, which stands for a GPU as in `pipeline.sizing`: tensors have
shapes and no values. An operation of the backward pass counts for the module whose forward pass
made it necessary; torch numbers the nodes of its graph, and the tape keeps the number's module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from benchmarks.ledger.traffic import (
    Access,
    copies_addend,
    distinct_bytes,
    element_offset,
    is_product,
    starts_no_kernel,
    touched_tensors,
)
from pipeline.sizing.flops import FLOP_FORMULAS
from pipeline.sizing.live_memory import KnownSizes

FLASH = ("_varlen_attn", "_varlen_attn_backward")
"""Attention over packed documents: FlashAttention 2."""
CUDNN = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
"""Attention over whole rows, which runs as this operation on the meta device, and on a GPU by
cuDNN's kernel."""


@dataclass(frozen=True)
class Operation:
    """An operation of a step that starts a kernel.

    Attributes:
        name: torch's, without its overload.
        module: the path of the module that it belongs to.
        backward: whether it is part of the backward pass.
        kind: "product", "attention", "collective" or "pointwise", which is everything else.
        reads, writes: what it touches.
        flops: of products and attention; 0 for others.
        region: what is compiled into one graph with it; None outside of such a graph.
        fused: how many operations of torch it stands for.
    """

    name: str
    module: str
    backward: bool
    kind: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: int = 0
    region: str | None = None
    fused: int = 1


@dataclass
class Tape(KnownSizes):
    """Records the operations while it is entered.

    Attributes:
        operations: those so far.
    """

    model: nn.Module
    compiled_modules: tuple[str, ...] = ()
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._paths = {module: path for path, module in self.model.named_modules()}
        self._running: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._region: str | None = None
        self._numbers: dict[int, int] = {}
        self._next_number = 0

    __hash__ = object.__hash__

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        module, backward = self._place()
        if not starts_no_kernel(operation):
            self._record(operation, args, kwargs or {}, result, module, backward)
        return result

    @contextmanager
    def modules_known(self) -> Iterator[None]:
        """Within it the tape knows which module runs."""

        def begin(module: nn.Module, *_: Any) -> None:
            if module in self._paths:
                self._running.append(self._paths[module])

        def end(module: nn.Module, *_: Any) -> None:
            if module in self._paths:
                self._running.pop()

        hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within it operations outside of the backward pass belong to `name`."""
        self._running.append(name)
        yield
        self._running.pop()

    @contextmanager
    def one_graph(self, name: str) -> Iterator[None]:
        """Within it everything is compiled into one graph."""
        self._region = f"{name} {len(self.operations)}"
        yield
        self._region = None

    def add(self, operation: Operation) -> None:
        """Adds an operation that the meta device does not have."""
        self.operations.append(operation)

    def numbered(self, tensor: Tensor, touched: int) -> Access:
        """`touched` bytes of a tensor, with the number of its storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._next_number += 1
            self._numbers[key] = self._next_number
            # A later storage may lie at the same address.
            weakref.finalize(storage, self._numbers.pop, key, None)
        return Access(self._numbers[key], element_offset(tensor), touched)

    def _place(self) -> tuple[str, bool]:
        """The module that the current operation belongs to, and whether it is in the backward
        pass."""
        node: Any = torch._C._current_autograd_node()  # None outside of the backward pass
        if node is not None:
            return self._module_of_node.get(node._sequence_nr(), "sums of gradients"), True
        module = self._running[-1] if self._running else "step"
        # The node that this operation's backward pass will run has the last number given out.
        self._module_of_node[torch._C._autograd._get_sequence_nr() - 1] = module
        return module, False

    def _record(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        module: str,
        backward: bool,
    ) -> None:
        reads, writes = touched_tensors(operation, args, kwargs, result)
        if not reads and not writes:
            return  # on the host
        if copies_addend(operation, args, kwargs):
            self._record_copy(args[0], result, module, backward)
        formula = FLOP_FORMULAS.get(operation.overloadpacket)
        flops = 0
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=result))
        self.operations.append(
            Operation(
                name=operation.overloadpacket.__name__,
                module=module,
                backward=backward,
                kind=kind_of(operation),
                reads=tuple(self.numbered(*read) for read in reads),
                writes=tuple(self.numbered(*written) for written in writes),
                flops=flops,
                region=self._region or self._compiled_region(module, backward),
            )
        )

    def _record_copy(self, source: Tensor, target: Tensor, module: str, backward: bool) -> None:
        """A copy that a kernel makes on a GPU and not on the meta device."""
        self.operations.append(
            Operation(
                name="copy_",
                module=module,
                backward=backward,
                kind="pointwise",
                reads=(self.numbered(source, distinct_bytes(source)),),
                writes=(self.numbered(target, distinct_bytes(target)),),
            )
        )

    def _compiled_region(self, module: str, backward: bool) -> str | None:
        """The compiled module that `module` is part of, and the pass."""
        for path in self.compiled_modules:
            if module == path or module.startswith(f"{path}."):
                return f"{path} backward" if backward else path
        return None


def kind_of(operation: Any) -> str:
    """The kind of an operation, as `Operation.kind`."""
    if is_product(operation):
        return "product"
    if operation.overloadpacket.__name__ in (*FLASH, *CUDNN):
        return "attention"
    if operation.namespace in ("c10d", "_c10d_functional"):
        return "collective"
    return "pointwise"
