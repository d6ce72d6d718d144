"""What the class for vLLM takes of vLLM, where vLLM is not installed: exact attention in its kernels'
place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGE = Path(__file__).parents[2] / "serving" / "scale_cpt_serving"


class ExactAttention(torch.nn.Module):
    """Takes what vLLM's `Attention` takes: flat [N, H K] -> [N, H K], for one text shorter than any
    window."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        logits_soft_cap: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.scale = num_heads, num_kv_heads, head_size, scale
        self.softcap = logits_soft_cap

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = query.view(1, -1, self.heads, self.size).transpose(1, 2)
        key, value = (
            heads.view(1, -1, self.kv_heads, self.size).transpose(1, 2) for heads in (key, value)
        )
        if self.softcap is None:
            found = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
            )
        else:
            key, value = (
                heads.repeat_interleave(self.heads // self.kv_heads, dim=1)
                for heads in (key, value)
            )
            scores = self.softcap * torch.tanh(query @ key.mT * self.scale / self.softcap)
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            found = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return found.transpose(1, 2).reshape(-1, self.heads * self.size)


def _load(parameter: Tensor, tensor: Tensor) -> None:
    parameter.data.copy_(tensor)


@contextmanager
def with_stand_ins() -> Iterator[ModuleType]:
    """The module of the class, while entered; nothing of it stays in `sys.modules`."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"VllmConfig": object},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"Attention": ExactAttention},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": _load},
        "scale_cpt_serving": {"__path__": [str(PACKAGE)]},
    }
    before = {name: module for name, module in sys.modules.items() if _is_replaced(name)}
    for name in before:
        del sys.modules[name]
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module
    try:
        yield importlib.import_module("scale_cpt_serving.vllm_model")
    finally:
        for name in list(filter(_is_replaced, sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)


def _is_replaced(name: str) -> bool:
    return name.partition(".")[0] in ("vllm", "scale_cpt_serving")


def vllm_config(hf_config: Any) -> SimpleNamespace:
    """What the class reads of vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, model="exported"),
        parallel_config=SimpleNamespace(world_size=1),
        quant_config=None,
        cache_config=None,
    )
