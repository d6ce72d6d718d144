"""Causal attention within documents and sliding windows, by the kernel that suits the device.

All kernels compute the same. On CUDA none makes a tensor of S x S elements: packed documents are
attended to with torch's variable-length flash attention, or with FlexAttention where that cannot
(fp32, soft-capping); rows of one document by the fused kernels of `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query: [B, S, H, K], key and value: [B, S, H_kv, K] -> [B, S, H, K]; H is a multiple of H_kv."""
_LARGEST_FLASH_HEAD = 256
_SMALLEST_FLEX_HEAD = 16
_HALF = (torch.float16, torch.bfloat16)
_NUM_SPLITS = 1 if torch.version.hip is None else None
"""A kernel may divide the keys of a query into parts by what else is in the batch; the sums of a
document would then round by its neighbours. ROCm's kernel has no such setting, and refuses one."""


@dataclass(frozen=True)
class Documents:
    """Where the documents of a batch lie; attention stays within them.

    Attributes:
        ids: [B, S], int64; a run of equal ids in a row is a document.
        starts: [N + 1], int32; where each of the N documents begins among the B·S tokens, row after
            row, then B·S.
        per_row: how many documents each row has.
    """

    ids: Tensor
    starts: Tensor
    per_row: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each document. On a GPU the host waits for them."""
        return tuple(self.starts.diff().tolist())

    @classmethod
    def whole_rows(cls, tokens: Tensor) -> Documents:
        """A document in each row of `tokens` [B, S], made on their device."""
        rows, length = tokens.shape
        starts = torch.arange(
            0, (rows + 1) * length, length, dtype=torch.int32, device=tokens.device
        )
        return cls(torch.zeros_like(tokens), starts, (1,) * rows)

    @classmethod
    def of(cls, ids: Tensor) -> Documents:
        """The documents of the `ids` [B, S]. On a GPU the host waits for them: make it before they
        are copied there."""
        begins = torch.ones_like(ids, dtype=torch.bool)
        # The first token of a row always begins a document: attention never crosses rows, which lie
        # end to end for the variable-length kernel.
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=ids.numel())
        return cls(ids, starts.int(), tuple(begins.sum(dim=1).tolist()))

    def first_rows(self, rows: int) -> Documents:
        """The documents of the first `rows` rows."""
        per_row = self.per_row[:rows]
        return Documents(self.ids[:rows], self.starts[: sum(per_row) + 1], per_row)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Documents:
        """The same with its tensors where `move` copies them to."""
        return Documents(move(self.ids), move(self.starts), self.per_row)


def attention_kernel(
    documents: Documents | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    compiled: bool = False,
) -> Attend:
    """The attention kernel for a batch.

    Args:
        documents: where the documents lie. None: every row is one document, and there is neither
            `window` nor `softcap`.
        device: where the batch is.
        dtype: the type of queries, keys and values.
        head_dim: the channels of a head, K.
        window: how many tokens of its document a token attends to, itself included; None: all
            before it.
        scale: the factor of the products of queries and keys; None: 1 / sqrt(head_dim).
        softcap: with c, a score becomes c · tanh(score / c).
        compiled: whether it is called in compiled layers, whose graph must suit every batch.
    """
    flash = dtype in _HALF and head_dim <= _LARGEST_FLASH_HEAD
    if documents is None:
        # Of the kernels without S x S scores only flash attention takes grouped heads.
        return CausalAttention(scale, grouped=flash or device.type != "cuda")
    if device.type not in ("cuda", "meta"):
        # Whichever it is, a row of a single document gets no other: the same sample must give the
        # same bits whatever else is in its batch.
        if window is None and softcap is None and not compiled:
            return DocumentAttention(documents.lengths, scale)
        return MaskedAttention(document_mask(documents.ids, dtype, window), scale, softcap)
    # The meta device stands for a GPU, but FlexAttention refuses it.
    if device.type == "meta" or (flash and head_dim % 8 == 0 and softcap is None):
        return VarlenAttention(documents.starts, window, scale)
    return FlexAttention(_block_mask(documents.ids, window), scale, softcap)


@dataclass(frozen=True)
class CausalAttention:
    """Attention in rows of one document each.

    Unless `grouped`, every query head gets a key and value head of its own.
    """

    scale: float | None = None
    grouped: bool = True

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.grouped:
            # Copies of key and value heads cost memory of B·S·H·K, where torch would otherwise fall
            # back to its unfused kernel, with B·H·S·S scores.
            key = _one_for_each(query, key)
            value = _one_for_each(query, value)
        return _scaled_dot_product(query, key, value, None, self.scale)


def _one_for_each(query: Tensor, heads: Tensor) -> Tensor:
    """Key or value heads, repeated for each query head: [B, S, H_kv, K] -> [B, S, H, K]."""
    queries_per_key = query.shape[2] // heads.shape[2]
    if queries_per_key == 1:
        return heads
    return heads.repeat_interleave(queries_per_key, dim=2)


@dataclass(frozen=True)
class DocumentAttention:
    """Attention in one document after another, of `lengths` tokens, laid end to end.

    On the CPU, whose fused kernel computes the scores that a mask hides, too.
    """

    lengths: tuple[int, ...]
    scale: float | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = query.shape[:2]
        # [B, S, H, K] -> a tensor [1, length, H, K] for each document.
        queries, keys, values = (
            heads.flatten(0, 1).unsqueeze(0).split(self.lengths, dim=1)
            for heads in (query, key, value)
        )
        found: list[Tensor] = []
        for own in zip(queries, keys, values, strict=True):
            found.append(_scaled_dot_product(*own, None, self.scale))
        return torch.cat(found, dim=1).squeeze(0).unflatten(0, rows)


@dataclass(frozen=True)
class MaskedAttention:
    """Attention with an additive mask [B, 1, S, S]."""

    mask: Tensor
    scale: float | None = None
    softcap: float | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # No fused kernel takes both a mask and grouped heads: torch would compute all scores,
        # [B, H, S, S].
        key = _one_for_each(query, key)
        value = _one_for_each(query, value)
        if self.softcap is None:
            return _scaled_dot_product(query, key, value, self.mask, self.scale)
        # No fused kernel of the CPU caps scores.
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        value = value.transpose(1, 2)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = query @ key.mT * scale
        scores = torch.tanh(scores / self.softcap) * self.softcap + self.mask
        # The softmax in fp32, as transformers' eager attention of Gemma 2 computes it.
        return (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).transpose(1, 2)


@dataclass(frozen=True)
class VarlenAttention:
    """Flash attention over all documents laid end to end; `starts` as in `Documents`."""

    starts: Tensor
    window: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        # A batch has any number of documents. A compiled layer would be compiled for the first
        # batch's, and again, in the middle of a run, for others. Padding to a few lengths would
        # leave one compilation for each, and give the kernel empty documents to start blocks for.
        torch._dynamo.maybe_mark_dynamic(self.starts, 0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        batch, length = query.shape[:2]
        # It returns a pair only if asked for statistics.
        heads: Tensor = varlen_attn(  # type: ignore[assignment]
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            self.starts,
            self.starts,
            # No document is longer than a row. The longest one's length would make the host wait,
            # and torch recompile.
            length,
            length,
            scale=self.scale,
            # How many earlier and later tokens are seen; -1: all.
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=query.shape[2] != key.shape[2],
            num_splits=_NUM_SPLITS,
        )
        return heads.unflatten(0, (batch, length))


@dataclass(frozen=True)
class FlexAttention:
    """FlexAttention with a block mask, in any type. On the CPU it is slow, and only compared with
    the others."""

    block_mask: Any
    scale: float | None = None
    softcap: float | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        attend = _compiled(flex_attention) if query.is_cuda else flex_attention
        head_dim = query.shape[-1]
        # Before heads are padded: the default would be that of the padded size.
        scale = head_dim**-0.5 if self.scale is None else self.scale
        # Its kernels take no smaller heads. Zeros change neither the products of queries and keys
        # nor the values.
        missing = max(0, _SMALLEST_FLEX_HEAD - head_dim)
        query = F.pad(query, (0, missing)).transpose(1, 2)
        key = F.pad(key, (0, missing)).transpose(1, 2)
        value = F.pad(value, (0, missing)).transpose(1, 2)
        heads = attend(
            query,
            key,
            value,
            score_mod=None if self.softcap is None else _soft_capping(self.softcap),
            block_mask=self.block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            # Fewer than 128 queries would take the kernel for decoding, which has no block size for
            # masks of documents.
            kernel_options={"BACKEND": "TRITON"} if query.is_cuda else None,
        )
        return heads.transpose(1, 2)[..., :head_dim]


def document_mask(document_ids: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """document_ids: [B, S] -> an additive attention mask [B, 1, S, S].

    It is -inf where the key is later than the query, before its window or of another document, else
    0. It has the dtype of the queries: attention would otherwise convert a copy in every layer.
    """
    length = document_ids.shape[1]
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    if window is not None:
        # Of the keys up to the query, the last `window`: the diagonal is the query itself.
        causal.triu_(1 - window)
    hidden = (same & causal).logical_not_().unsqueeze(1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, float("-inf")
    )


def _scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Shapes as in `Attend`; without a mask it is causal."""
    grouped = query.shape[2] != key.shape[2]
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    if query.is_meta:
        # There torch would choose products that are not fused, which sizing would count.
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        heads: Tensor = fused(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)[0]
    else:
        heads = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=grouped,
        )
    return heads.transpose(1, 2)


def _block_mask(ids: Tensor, window: int | None = None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < key + reach) & (ids[row, query] == ids[row, key])

    rows, length = ids.shape
    reach = length if window is None else window
    # Compiled, it evaluates the mask block by block instead of making all S x S elements.
    create = _compiled(create_block_mask) if ids.is_cuda else create_block_mask
    return create(visible, rows, None, length, length, device=str(ids.device))


@cache
def _soft_capping(cap: float) -> Callable[..., Tensor]:
    """The change of a score as FlexAttention takes it; the same function for all layers, which then
    share a kernel."""
    return lambda score, *_: cap * torch.tanh(score / cap)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)
