"""Attention of a hosted base by the kernels of native bases, without masks of all pairs of tokens.

transformers' attention modules call the function that their configuration names, and hand it the
arguments of the model's forward pass that they do not know (`AttentionInterface`). For the time of
a pass the configurations name `attend`, and such an argument says where the documents lie, as
`cu_seq_lens` does for transformers' flash attention. For a name without a function for masks
transformers makes none, and does not ask the device whether rows hold several documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from pipeline.errors import BaseModelError
from pipeline.model.attention import Attend, Documents, attention_kernel

NAME = "scale_documents"
"""The name of `attend` in transformers' configurations."""
ROWS = "scale_rows"
"""The argument of the forward pass by which `attend` gets its `AttentionRows`."""
KERNEL_DEVICES = ("cuda", "meta")
"""Where a base attends by these kernels; the meta device stands for a GPU. On a CPU transformers'
own attention stays: there the kernels would make masks too."""

_OF_POSITIONS = ("position_ids", "cache_position")
"""Arguments with tensors that rotate queries and keys before the attention is called."""


class UnsupportedAttentionError(BaseModelError):
    """An attention of a base that the kernels do not compute."""


class AttentionRows:
    """The rows of one forward pass, and the kernels by which its layers attend within them."""

    def __init__(self, tokens: Tensor, documents: Documents | None) -> None:
        """`tokens`: [B, S]. `documents`: where they lie; None: every row is one document."""
        self._tokens = tokens
        self._documents = documents
        # Layers of a kind share a kernel, whose mask may be large.
        self._kernels: dict[tuple[Any, ...], Attend] = {}

    @property
    def was_used(self) -> bool:
        """Whether a layer has asked for a kernel."""
        return bool(self._kernels)

    @property
    def shape(self) -> torch.Size:
        """[B, S]"""
        return self._tokens.shape

    def kernel(
        self,
        dtype: torch.dtype,
        head_dim: int,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Attend:
        """The kernel for queries, keys and values of `dtype`; the rest as in `attention_kernel`."""
        if window is not None and window >= self.shape[1]:
            window = None
        key = (dtype, head_dim, window, scale, softcap)
        if key not in self._kernels:
            documents = self._documents
            if documents is None and (window is not None or softcap is not None):
                documents = Documents.whole_rows(self._tokens)
            self._kernels[key] = attention_kernel(
                documents,
                self._tokens.device,
                dtype,
                head_dim,
                window=window,
                scale=scale,
                softcap=softcap,
            )
        return self._kernels[key]


class BaseAttention:
    """Switches a base's modules between transformers' attention and `attend`."""

    def __init__(self, base: nn.Module) -> None:
        # A multimodal base has a configuration for each part, and some copy theirs for a layer.
        configs: dict[int, PretrainedConfig] = {}
        for module in base.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PretrainedConfig):
                configs[id(config)] = config
        self._configs = list(configs.values())

    @contextmanager
    def by_kernels(self) -> Iterator[None]:
        """Within it, the modules call `attend`, and need the argument `ROWS`."""
        # By the attribute behind the property, which would also change the configurations of parts.
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' modules call it.

    query: [B, H, S, K], key: [B, H_kv, S, K], value: [B, H_kv, S, V] -> [B, S, H, V], and None in
    place of the weights.

    Raises:
        UnsupportedAttentionError: the module asks for something that the kernels do not compute.
    """
    name = type(module).__name__
    rows = options.pop(ROWS, None)
    if not isinstance(rows, AttentionRows):
        raise UnsupportedAttentionError(f"{name} does not get the arguments of the forward pass")
    if attention_mask is not None:
        raise UnsupportedAttentionError(f"{name} has a mask of its own")
    for argument, given in options.items():
        # Sinks, biases of positions, the keys that sparse attention chooses.
        if isinstance(given, Tensor) and argument not in _OF_POSITIONS:
            raise UnsupportedAttentionError(f"{name} changes its scores ({argument})")
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal or options.get("dropout"):
        raise UnsupportedAttentionError(f"{name} is not causal, or has dropout")
    for heads in (query, key):
        if (heads.shape[0], heads.shape[2]) != rows.shape:
            raise UnsupportedAttentionError(f"{name} attends to other tokens than its rows'")
    size, value_size = query.shape[-1], value.shape[-1]
    scale = options.get("scaling")
    if scale is None:
        scale = size**-0.5
    # The kernels take heads of one size, where latent attention has smaller values. Zeros change
    # neither the products of queries and keys nor the values.
    padded = max(size, value_size)
    kernel = rows.kernel(
        query.dtype, padded, options.get("sliding_window"), scale, options.get("softcap")
    )
    heads = kernel(
        _padded(query, padded).transpose(1, 2),
        _padded(key, padded).transpose(1, 2),
        _padded(value, padded).transpose(1, 2),
    )
    return heads[..., :value_size], None


def _padded(heads: Tensor, size: int) -> Tensor:
    """`heads`: [B, H, S, K], with zeros up to [B, H, S, size]."""
    missing = size - heads.shape[-1]
    # Padding by nothing would copy.
    return F.pad(heads, (0, missing)) if missing else heads


AttentionInterface.register(NAME, attend)
