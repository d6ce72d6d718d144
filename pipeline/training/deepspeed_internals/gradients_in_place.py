"""Gradients that ZeRO-1 need not copy."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from pipeline.parallel.topology import Layout


def leave_gradients_in_place(engine: Any, layout: Layout) -> None:
    """Stops ZeRO-1 from copying the gradients of a single data-parallel rank, after the engine is
    made.

    DeepSpeed copies them into a bucket, divides by 1, and copies them into a second buffer, which
    for 135 M parameters in fp32 takes as long as 60 tokens of a step. The values are the same to
    the bit. ZeRO-2 reduces while gradients come, 16-bit weights round them to a type of their own,
    and ZeRO-3 has no buckets: these stay as they are. bf16 with gradients in fp32 is another
    optimizer of DeepSpeed, `BF16_Optimizer`, without these buckets.
    """
    optimizer = engine.optimizer
    if layout.dp_size > 1 or not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    changes_gradients = (
        optimizer.partition_gradients
        or optimizer.overlap_comm
        or optimizer.cpu_offload
        or optimizer.use_grad_accum_attribute
        or optimizer.gradient_accumulation_dtype != optimizer.dtype
        or optimizer.communication_data_type != optimizer.dtype
    )
    if not changes_gradients:
        optimizer.reduce_independent_p_g_buckets_and_remove_grads = _nothing_to_reduce


def _nothing_to_reduce(parameter: Tensor, group: int) -> None:
    """Takes the place of DeepSpeed's method of adding a gradient to a bucket."""
