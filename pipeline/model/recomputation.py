"""Layers that the backward pass computes again, and the results that they keep all the same.

Selective recomputation (Korthikanti et al. 2022, section 5), by operation: norms, activations and
sums are computed again, as they cost memory and hardly any time. What is kept is read from memory
in the second pass, so that losses and gradients have the same bits whatever is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # noqa: F401  # registers its operation
from torch import Tensor
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pipeline.model.decoder_layer import Context, DecoderLayer
from pipeline.open_tokens import OpenTokens
from pipeline.parallel.parameters import full_shape_of, partition_of
from pipeline.parallel.sharding import local_shape
from pipeline.scale.widened_linear import Streams

KeptResults = Literal["nothing", "attention", "products"]
"""What a layer keeps that is computed again: nothing; the results of its attention kernels; or also
the products of its FFN's gate and up maps."""

_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
}
# By operation, which of its arguments is the transposed weight, [..., in, out].
_PRODUCTS = {
    _aten.mm.default: 1,
    _aten.addmm.default: 2,
    _aten._scaled_mm.default: 1,
    _aten._grouped_mm.default: 1,
}
Shape = tuple[int, int]


class _Keeping(_CachingTorchDispatchMode):
    """Keeps results in the forward pass; sees only operations whose results may be kept.

    torch's own mode counts all. In the backward pass ZeRO-3 may gather by more operations than in
    the forward pass, at which that raises an error.
    """

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation not in _ATTENTION and operation not in _PRODUCTS:
            return operation(*args, **(kwargs or {}))
        return super().__torch_dispatch__(operation, types, args, kwargs)


class _Reusing(_CachedTorchDispatchMode):
    """Gives what was kept, in the same order, in the backward pass; sees what `_Keeping` sees."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation not in _ATTENTION and operation not in _PRODUCTS:
            return operation(*args, **(kwargs or {}))
        return super().__torch_dispatch__(operation, types, args, kwargs)


def _keeping_contexts(shapes: frozenset[Shape]) -> tuple[_Keeping, _Reusing]:
    """The contexts of a layer's forward pass and of its recomputation."""
    storage: dict[Any, dict[int, Any]] = defaultdict(dict)
    return _Keeping(partial(_is_kept, shapes), storage), _Reusing(None, storage)


def run_recomputed(
    layer: DecoderLayer,
    x: Tensor,
    x_up: Tensor | None,
    context: Context,
    open_tokens: OpenTokens,
    kept: KeptResults,
) -> Streams:
    """`layer` with its arguments; the backward pass computes it again, but for what is `kept`."""
    streams: Streams
    if kept == "nothing":
        streams = checkpoint(layer, x, x_up, context, open_tokens, use_reentrant=False)
        return streams
    shapes: frozenset[Shape] = frozenset()
    if kept == "products":
        shapes = gate_and_up_shapes(layer)
    contexts: Callable[[], Any] = partial(_keeping_contexts, shapes)
    if torch.compiler.is_compiling():
        # The compiler needs a policy for every operation; ZeRO-3 is never compiled.
        contexts = partial(create_selective_checkpoint_contexts, partial(_is_kept, shapes))
    streams = checkpoint(
        layer, x, x_up, context, open_tokens, use_reentrant=False, context_fn=contexts
    )
    return streams


def _is_kept(
    shapes: frozenset[Shape], _: object, operation: Any, *arguments: Any, **named: Any
) -> bool:
    """Whether the result of an operation is kept; `shapes` are those of the weights of products."""
    if operation in _ATTENTION:
        return True
    place = _PRODUCTS.get(operation)
    if place is None or not shapes:
        return False
    # An operation does not say which map it is of. A map of another kind of the same shape is kept
    # too, which costs memory and saves its time.
    in_features, out_features = arguments[place].shape[-2:]
    return (in_features, out_features) in shapes


def gate_and_up_shapes(layer: DecoderLayer) -> frozenset[Shape]:
    """(in, out) of this rank's shard of each matrix that widens the residual streams in the FFN.

    Shared and routed experts are among them, and the blocks of an expansion.
    """
    tp_size = layer.ffn.tp.size
    shapes: set[Shape] = set()
    # Experts that ranks share are buffers under ZeRO-3.
    weights = (*layer.ffn.named_parameters(), *layer.ffn.named_buffers())
    for path, parameter in weights:
        parts = path.split(".")
        if parts[-1] != "weight" or not {"gate", "up"} & set(parts):
            continue
        # Not the parameter's own shape: ZeRO-3 cuts it, and a quantised one is bytes.
        shape = full_shape_of(parameter)
        out_features, in_features = local_shape(shape, partition_of(parameter), tp_size)[-2:]
        shapes.add((in_features, out_features))
    return frozenset(shapes)
