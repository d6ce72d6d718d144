"""The settings of a DeepSpeed JSON file that decide memory and messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.deepspeed_config import DeepSpeedConfig

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
