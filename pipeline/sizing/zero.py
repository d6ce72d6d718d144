"""The settings of a DeepSpeed JSON file that decide memory and messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.deepspeed_config import DeepSpeedConfig

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}


@dataclass(frozen=True)
class GatherSettings:
    """The keys of `zero_optimization` that control gathering, in elements, with DeepSpeed's defaults."""

    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000


@dataclass(frozen=True)
class ZeroSettings:
    """What a DeepSpeed JSON file says, at `stage`.

    Attributes:
        dtype: of weights and matrix products.
        accumulation_dtype: of the gradients that are accumulated over micro-batches.
        communication_dtype: of the gradients in messages.
        bucket_elements: the size of a gradient bucket, in elements.
        overlaps: whether communication overlaps with computation.
        gathering: the settings of ZeRO-3's gathers.
        host_optimizer, host_weights: whether these are offloaded to the host.
    """

    stage: int
    dtype: torch.dtype
    accumulation_dtype: torch.dtype
    communication_dtype: torch.dtype
    bucket_elements: int
    overlaps: bool
    gathering: GatherSettings
    host_optimizer: bool
    host_weights: bool

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether every rank accumulates all gradients in fp32, in addition to those that autograd writes.

        DeepSpeed's BF16_Optimizer does: ZeRO-1 over 16-bit weights with fp32 accumulation.
        """
        return self.stage == 1 and self.dtype != self.accumulation_dtype


def zero_settings(config: DeepSpeedConfig, stage: int) -> ZeroSettings:
    """The settings of a JSON file; those at another stage than its own are without offloading."""
    zero = config.zero

    def dtype(name: str | None) -> torch.dtype:
        return config.dtype if name is None else _DTYPES[name]

    def on_host(section: dict[str, Any]) -> bool:
        return stage == config.zero_stage and section.get("device", "none") != "none"

    given = {name: int(zero[f"stage3_{name}"]) for name in GatherSettings.__annotations__ if f"stage3_{name}" in zero}
    return ZeroSettings(
        stage=stage,
        dtype=config.dtype,
        accumulation_dtype=dtype(config.values.get("data_types", {}).get("grad_accum_dtype")),
        communication_dtype=dtype(config.values.get("communication_data_type")),
        bucket_elements=int(zero.get("reduce_bucket_size", 500_000_000)),
        overlaps=bool(zero.get("overlap_comm", stage == 3)),
        gathering=GatherSettings(**given),
        host_optimizer=on_host(zero.get("offload_optimizer", {})),
        host_weights=on_host(zero.get("offload_param", {})),
    )
