"""Calls of a tiny copy's modules while it continues a cached text, as generation does."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.extensions.hosted.discovery.probes import Batch
from pipeline.extensions.hosted.discovery.recorded_calls import Calls, record

_CACHED = 7
"""The length of the text before."""
_CONTINUATIONS = (1, 4)
"""How many tokens continue it. Recurrent mixers have code of their own for a single one."""


@dataclass(frozen=True)
class Recording:
    """The calls of a model's modules for a text of this size, which may continue another one."""

    batch: Batch
    calls: Calls


@torch.no_grad()
def record_continuations(tiny: nn.Module, tokens: Tensor) -> list[Recording]:
    """The calls that continue a cached text, for one token and for several; none for a model that
    runs without a cache alone.

    Args:
        tiny copy: the model.
        tokens: int64 [B, S], of which the first row is read.
    """
    recordings: list[Recording] = []
    for length in _CONTINUATIONS:
        first, then = tokens[:1, : _CACHED + length].split([_CACHED, length], dim=1)
        try:
            cache = _cache_of(tiny, tiny(input_ids=first, use_cache=True))
            if not cache:
                continue
            calls = record(tiny, {"input_ids": then, "use_cache": True, **cache})
        except Exception:  # noqa: BLE001 - some types raise whatever they are given, without a run
            continue
        recordings.append(Recording(Batch(rows=1, length=length), calls))
    return recordings


def _cache_of(tiny: nn.Module, output: Any) -> dict[str, Any]:
    """What a forward gives and the next one takes, as its argument.

    Types call it `past_key_values`, `cache_params`, `state`.
    """
    cache: dict[str, Any] = {}
    for name in inspect.signature(tiny.forward).parameters:
        value = output.get(name)
        if value is not None and not isinstance(value, Tensor):
            cache[name] = value
    return cache
