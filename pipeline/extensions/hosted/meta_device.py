"""Runs transformers' code on the meta device, where tensors have shapes and no data.

That code calls kernels that the meta device lacks: fused attention, and grouped products of
experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import faults_of_library
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.sizing.meta_device import NotTracedError


@contextmanager
def transformers_code_traced(spec: HostedSpec) -> Iterator[None]:
    """Within it, the code of a hosted base runs on the meta device.

    Raises:
        NotTracedError: the code fails all the same.
    """
    what = (
        f"memory and time of a {spec.family} are not estimated (train a few steps, and read "
        "memory_peak_* and tokens_per_second_per_gpu in the run's metrics.jsonl): transformers' "
        "code of it does not run without data"
    )
    # Whatever that code raises becomes a NotTracedError: a run must not fail because its estimate
    # does.
    with faults_of_library(what, NotTracedError), kernels_of_gpus():
        yield


@contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """Within it, attention and experts on the meta device cost what they cost on a GPU.

    It replaces the functions of torch.nn.functional that transformers calls. A TorchFunctionMode
    would not do: it is off in the backward pass, which may run layers again.
    """
    attention = F.scaled_dot_product_attention
    grouped = F.grouped_mm

    def attend(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if query.is_meta:
            return _fused_attention(query, *arguments, **options)
        return attention(query, *arguments, **options)

    def multiply(tokens: Tensor, experts: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """tokens: [T, K], experts: [E, K, N] -> [T, N]."""
        if tokens.is_meta:
            # A token takes one expert in each product: one expert for all costs the same.
            return tokens @ experts[0]
        return grouped(tokens, experts, *arguments, **options)

    F.scaled_dot_product_attention = attend
    F.grouped_mm = multiply  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention
        F.grouped_mm = grouped


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by the kernel that keeps what a GPU's kernels keep.

    query: [B, H, S, K], key: [B, H_kv, S, K], value: [B, H_kv, S, V] -> [B, H, S, V].
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # torch makes an additive mask of it in each layer, and keeps it for the backward pass.
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
    size = value.shape[-1]
    if size != query.shape[-1]:
        # The kernel takes values of the queries' size only; latent attention has smaller ones.
        value = F.pad(value, (0, query.shape[-1] - size))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    heads: Tensor = fused(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return heads[..., :size]
