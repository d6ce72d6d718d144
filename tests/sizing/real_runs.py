"""Runs of which tests compare the estimates with real steps (`benchmarks.recorded_steps`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.recorded_steps import last_of_three_steps
from pipeline.config.run import RunConfig, load_config
from pipeline.parallel.topology import Layout
from tests.training.runs import start_deepspeed, write_config

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
COMMUNICATION = {"communication_data_type": "fp32"}
BUCKETS = {"overlap_comm": False, "reduce_bucket_size": 4096}
# Limits so tight that a model of a few hundred thousand parameters is gathered and released in
# parts.
TIGHT = {
    "stage3_param_persistence_threshold": 20,
    "stage3_prefetch_bucket_size": 3000,
    "stage3_max_live_parameters": 90000,
    "stage3_max_reuse_distance": 90000,
}
ZERO = {
    "zero1": {**BF16, "zero_optimization": {"stage": 1, **BUCKETS}},
    "zero2": {**BF16, **COMMUNICATION, "zero_optimization": {"stage": 2, **BUCKETS}},
    "zero3": {**BF16, **COMMUNICATION, "zero_optimization": {"stage": 3, **BUCKETS}},
    "zero3 tight": {**BF16, **COMMUNICATION, "zero_optimization": {"stage": 3, **BUCKETS, **TIGHT}},
    "zero1 fp32": {"zero_optimization": {"stage": 1, **BUCKETS}},
    "zero3 fp32": {"zero_optimization": {"stage": 3, **BUCKETS, **TIGHT}},
}
SCALE = {
    "name": "scale",
    "expansion": {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2},
}
METHODS = {
    "preserve": {**SCALE, "variant": "preserve"},
    "adapt": {**SCALE, "variant": "adapt", "l_fp": 2},
    "route": {**SCALE, "variant": "route", "l_fp": 3},
    "adapt with open weights": {
        **SCALE,
        "variant": "adapt",
        "l_fp": 2,
        "open_rows": {"min_count": 5},
        "open_gains": True,
        "low_rank": 4,
    },
    "fft": {"name": "fft"},
    "freeze": {"name": "freeze", "frozen_layers": 2},
    "lora": {"name": "lora", "rank": 8},
    "llama_pro": {"name": "llama_pro", "added_layers": 1},
}
MICRO_BATCHES = 2


def run_config(folder: Path, zero: str, method: str, layout: Layout, **changes: Any) -> RunConfig:
    """A run of `MICRO_BATCHES` micro-batches a step on `layout`."""
    batch = 2 * layout.dp_size * MICRO_BATCHES
    settings = {
        "method": METHODS[method],
        "parallel__tp_size": layout.tp_size,
        "schedule__global_batch_size": batch,
    }
    if method == "adapt with open weights":
        settings["gate"] = {}  # without one they are refused
    config = load_config(write_config(folder, folder, **(settings | changes)))
    config.deepspeed.write_text(json.dumps(ZERO[zero]))
    return config


def steps_on_rank(configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Makes three steps of each run in turn; returns what its last step sent and the most that it
    held."""
    start_deepspeed()
    return [last_of_three_steps(config) for config in configs]
