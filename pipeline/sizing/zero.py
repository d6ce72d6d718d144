"""What DeepSpeed's JSON file says of memory and messages; what ZeRO partitions, and what ZeRO-3 gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.sizing.micro_batch import MicroBatchCosts

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}


@dataclass(frozen=True)
class ZeroSettings:
    """What a DeepSpeed JSON file says, at `stage`; sizes are in elements, with DeepSpeed's defaults.

    Attributes:
        dtype: of weights and matrix products.
        accumulation_dtype: of the gradients that are accumulated over micro-batches.
        communication_dtype: of the gradients in messages.
        bucket_elements: the size of a gradient bucket.
        overlaps: whether communication overlaps with computation.
        host_optimizer, host_weights: whether these are offloaded to the host.
        prefetch_bucket_size, param_persistence_threshold, max_live_parameters, max_reuse_distance: of ZeRO-3's gathers.
    """

    stage: int
    dtype: torch.dtype
    accumulation_dtype: torch.dtype
    communication_dtype: torch.dtype
    bucket_elements: int = 500_000_000
    overlaps: bool = False
    host_optimizer: bool = False
    host_weights: bool = False
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000


def zero_settings(config: DeepSpeedConfig, stage: int) -> ZeroSettings:
    """The settings of a JSON file; those at another stage than its own are without offloading."""
    zero = config.zero

    def dtype(name: str | None) -> torch.dtype:
        return config.dtype if name is None else _DTYPES[name]

    def on_host(part: str) -> bool:
        return stage == config.zero_stage and zero.get(f"offload_{part}", {}).get("device", "none") != "none"

    gathers = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
    return ZeroSettings(
        stage=stage,
        dtype=config.dtype,
        accumulation_dtype=dtype(config.values.get("data_types", {}).get("grad_accum_dtype")),
        communication_dtype=dtype(config.values.get("communication_data_type")),
        bucket_elements=int(zero.get("reduce_bucket_size", ZeroSettings.bucket_elements)),
        overlaps=bool(zero.get("overlap_comm", stage == 3)),
        host_optimizer=on_host("optimizer"),
        host_weights=on_host("param"),
        **{name: int(zero.get(f"stage3_{name}", getattr(ZeroSettings, name))) for name in gathers},
    )


def partition_size(size: int, dp_size: int) -> int:
    """A rank's part of `size` elements; that of the last rank is padded."""
    return -(-size // dp_size)


class Gathering(NamedTuple):
    """What ZeRO-3 gathers in a micro-batch in total, and the most that is gathered at once. In elements."""

    total: int
    most_at_once: int


def estimate_gathering(costs: MicroBatchCosts, zero: ZeroSettings) -> Gathering:
    """What DeepSpeed gathers in a micro-batch; nothing below ZeRO-3.

    It gathers each parameter once for the forward pass. Up to `max_live_parameters` elements are prefetched and stay
    for the backward pass, or those used last within `max_reuse_distance`; the others are gathered again if the backward
    pass reads them. Frozen parameters of a layer that is recomputed are always released and gathered once more: see
    `PartitionedParameterCoordinator.release_sub_module`. Parameters of at most `param_persistence_threshold` elements
    are never partitioned, so never gathered.
    """
    if zero.stage < 3:
        return Gathering(0, 0)

    def partitioned(sizes: Sequence[int]) -> list[int]:
        return [size for size in sizes if size > zero.param_persistence_threshold]

    whole, returning = sum(partitioned(costs.parameter_sizes)), sum(partitioned(costs.returning_sizes))
    live = zero.max_live_parameters if zero.prefetch_bucket_size else 0
    kept = min(whole, max(live, zero.max_reuse_distance // 2))  # a way up and down again
    again = returning * (1 - kept / whole) if whole else 0
    total = whole + round(again) + sum(partitioned(costs.recomputed_sizes))
    return Gathering(total, min(whole, kept + max(partitioned(costs.parameter_sizes), default=0)))
