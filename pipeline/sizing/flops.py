"""The FLOPs of a training step, and of a token served, counted on the meta device.

The model runs forward and backward on the meta device, without computing anything. So frozen parts
and paths without gradients count for what they really cost under every method, without a formula
for each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen  # noqa: F401  # registers its operations
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count, shape_wrapper

from pipeline.model.bases import kind_of
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.sizing.live_memory import KnownSizes

_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm")


def _sum_and_product_flops(
    _: Sequence[int], left: Sequence[int], right: Sequence[int], *__: Any, **___: Any
) -> int:
    """left: [M, N], right: [N, K]."""
    rows, inner = left
    return 2 * rows * inner * right[1]


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(_: Sequence[int], *shapes: Any, **__: Any) -> int:
    """Two products for each product of the forward pass, without what a kernel recomputes."""
    # The forward pass has two products, of scores and of values. The backward pass has two for each
    # of them: one for the gradient of each operand. Flash attention also computes the scores again,
    # which MFU does not count, as the model does not need it.
    return 2 * _attention_flops(*shapes)


def _varlen_flops(
    query: Sequence[int], _: Sequence[int], value: Sequence[int], *rest: Any, **__: Any
) -> int:
    """Attention over rows that are laid end to end: query [B·S, H, K].

    Of the further arguments, rest[2] is the length of the longest row, and the only list is the
    window: how many earlier and later keys a token has, -1 for all.
    """
    tokens, heads, head_dim = query
    keys = rest[2]
    for given in rest:
        if isinstance(given, list) and given[0] >= 0:
            keys = min(keys, given[0] + 1)
    # Half of a causal square is masked, but torch's own formula counts all of it, as PaLM's MFU
    # does (Chowdhery et al. 2022, appendix B): figures stay comparable.
    return int(
        sdpa_flop_count(
            (1, heads, tokens, head_dim), (1, heads, keys, head_dim), (1, heads, keys, value[-1])
        )
    )


def _varlen_backward_flops(_: Sequence[int], *shapes: Any, **__: Any) -> int:
    query, key, value, _out, _log_sums, *rest = shapes
    return 2 * _varlen_flops(query, key, value, *rest)


# torch's formulas, and ours. That of torch for sums with products refuses a type of the result. The
# others are for the kernels that pipeline.model.attention runs on the meta device.
# torch has no formula for the first kernel. Its formula for the second one, which layers with
# windows run, reads values, and meta tensors have none.
FLOP_FORMULAS = {
    **flop_registry,
    torch.ops.aten.addmm: shape_wrapper(_sum_and_product_flops),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(_attention_flops),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(
        _attention_backward_flops
    ),
    torch.ops.torch_attn._varlen_attn: shape_wrapper(_varlen_flops),
    torch.ops.torch_attn._varlen_attn_backward: shape_wrapper(_varlen_backward_flops),
}


class _FlopCount(KnownSizes):
    """Counts FLOPs by operation.

    torch's FlopCounterMode also counts them by module, which takes several times as long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        formula = FLOP_FORMULAS.get(operation.overloadpacket)
        if formula is not None:
            self.flops[str(operation.overloadpacket)] += formula(
                *args, **(kwargs or {}), out_val=result
            )
        return result


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations per token, forward and backward; a multiply-add counts as two."""

    matrix: float
    attention: float

    @property
    def total(self) -> float:
        """Matrix products and attention together."""
        return self.matrix + self.attention


def count_flops(
    meta_model: CausalDecoder, sequence_length: int, kl_fraction: float = 0.0
) -> FlopsPerToken:
    """The FLOPs a token of one training step.

    Args:
        meta_model: built under `torch.device("meta")`, with `requires_grad` set. Where gradients
            are off, only the forward pass counts.
        sequence_length: tokens of a sequence.
        kl_fraction: the share of the sequences that train by KL(base || model), which also takes
            the base's logits.
    """
    tokens = torch.zeros(1, sequence_length, dtype=torch.long, device="meta")
    counts: dict[str, float] = defaultdict(float)
    every_chunk = meta_model.output.chunks
    meta_model.output.chunks = _one_chunk_of_each_loss  # type: ignore[method-assign]
    # One sequence of each kind, weighted by its share: without and with KL.
    for kl_sequences, share in ((0, 1 - kl_fraction), (1, kl_fraction)):
        if share == 0:
            continue
        with kind_of(meta_model.spec).traced(meta_model.spec), _FlopCount() as count:
            total_loss = meta_model(tokens, tokens, None, None, kl_sequences, kl_sequences).total
            if torch.is_grad_enabled():
                total_loss.backward()
        for operation, flops in count.flops.items():
            counts[operation] += share * flops / sequence_length
    meta_model.output.chunks = every_chunk  # type: ignore[method-assign]
    matrix = 0.0
    for operation in _MATRIX_PRODUCTS:
        matrix += counts[operation]
    return FlopsPerToken(matrix=matrix, attention=sum(counts.values()) - matrix)


@dataclass(frozen=True)
class ServedFlops:
    """FLOPs per token of a text that a gated model reads; a multiply-add counts as two.

    Attributes:
        closed: where the gate stays closed, so that only the base runs.
        open: where it is open. Layers below the gate that run twice count twice.
    """

    closed: float
    open: float


class _OpenGate:
    """A gate before layer `layer` that opens for every token, whatever the stream is."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def is_open(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)

    def opens_id(self, tokens: Tensor) -> Tensor:
        return torch.ones_like(tokens, dtype=torch.bool)


@torch.no_grad()
def count_served_flops(
    meta_model: CausalDecoder, sequence_length: int, gate_layer: int
) -> ServedFlops:
    """The FLOPs of reading one text at once, with a gate before layer `gate_layer`.

    Args:
        meta_model: built under `torch.device("meta")`, by a method that a gate may close.
        sequence_length: tokens of the text.
        gate_layer: the layer before which the gate reads; the number of layers: after the last.
    """
    tokens = torch.zeros(1, sequence_length, dtype=torch.long, device="meta")
    with kind_of(meta_model.spec).traced(meta_model.spec), _FlopCount() as closed:
        meta_model.logits(tokens, path="base")
    meta_model.gate = _OpenGate(gate_layer)
    with kind_of(meta_model.spec).traced(meta_model.spec), _FlopCount() as opened:
        meta_model.logits(tokens)
    meta_model.gate = None
    return ServedFlops(
        closed=closed.flops.total() / sequence_length, open=opened.flops.total() / sequence_length
    )


def count_difference_flops(
    meta_model: CausalDecoder, sequence_length: int, gate_layer: int
) -> ServedFlops:
    """The FLOPs of reading one text at once, after full fine-tuning with a gate.

    The base reads a closed text. The trained model reads an open one, and so do the base's layers
    below `gate_layer`, for the gate.
    """
    tokens = torch.zeros(1, sequence_length, dtype=torch.long, device="meta")
    with _FlopCount() as whole:
        meta_model.logits(tokens)
    with _FlopCount() as lower:
        meta_model.base_stream(tokens, layer=gate_layer)
    closed = whole.flops.total() / sequence_length
    return ServedFlops(closed=closed, open=closed + lower.flops.total() / sequence_length)


def _one_chunk_of_each_loss(tokens: int, kl_tokens: int = 0) -> Iterator[slice]:
    """One chunk for each loss: the same FLOPs as all its chunks have, in fewer operations."""
    if kl_tokens > 0:
        yield slice(0, kl_tokens)
    if tokens > kl_tokens:
        yield slice(kl_tokens, tokens)
