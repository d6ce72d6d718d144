"""The settings of DeepSpeed's ZeRO that decide what a rank holds and sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.estimation.gathering import GatherSettings

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}


@dataclass(frozen=True)
class ZeroSettings:
    """What a DeepSpeed JSON says of memory and messages, at `stage`.

    Attributes:
        dtype: of weights and products.
        accumulation_dtype: of the gradients that micro-batches add up in.
        communication_dtype: of gradients under way.
        bucket_elements: how many gradients travel in one message.
        overlaps: whether messages run beside the computation.
        gathering: ZeRO-3's own.
        host_optimizer, host_weights: kept in host memory, not on the GPU.
    """

    stage: int
    dtype: torch.dtype
    accumulation_dtype: torch.dtype
    communication_dtype: torch.dtype
    bucket_elements: int
    overlaps: bool
    gathering: GatherSettings
    host_optimizer: bool = False
    host_weights: bool = False

    @property
    def keeps_whole_gradients(self) -> bool:
        """ZeRO-1 over 16-bit weights with fp32 accumulation is DeepSpeed's BF16_Optimizer: it adds gradients up in a
        whole fp32 buffer, beside those that autograd writes."""
        return self.stage == 1 and self.dtype != self.accumulation_dtype


def zero_settings(config: DeepSpeedConfig, stage: int | None = None) -> ZeroSettings:
    """The settings of a JSON file, or what they would be at another stage (then without offloading)."""
    zero = config.zero
    own = stage is None or stage == config.zero_stage
    stage = stage or config.zero_stage
    accumulation = _dtype(config.values.get("data_types", {}).get("grad_accum_dtype"), config.dtype)
    return ZeroSettings(
        stage=stage,
        dtype=config.dtype,
        accumulation_dtype=accumulation,
        communication_dtype=_dtype(config.values.get("communication_data_type"), config.dtype),
        bucket_elements=int(zero.get("reduce_bucket_size", 500_000_000)),
        overlaps=bool(zero.get("overlap_comm", stage == 3)),
        gathering=GatherSettings.of(zero),
        host_optimizer=own and _on_host(zero, "offload_optimizer"),
        host_weights=own and _on_host(zero, "offload_param"),
    )


def _on_host(zero: dict[str, Any], name: str) -> bool:
    return zero.get(name, {}).get("device", "none") != "none"


def _dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    return default if name is None else _DTYPES[name]
