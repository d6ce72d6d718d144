"""Real checkpoints for tests: a few steps of real DeepSpeed, saved by the trainer's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.trained_model import TrainedModel, open_trained
from pipeline.config.method import Lora, starts_from_expansion
from pipeline.config.run import RunConfig, parse_config
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import open_base
from pipeline.parallel.parameters import default_dtype, named_trained_parameters
from pipeline.parallel.topology import Layout, ProcessGroups
from tests.widened import scale_settings, shake, some_batch, started, widened

FFT = {"name": "fft"}
SEQUENCE = 12
CORPUS = {
    "input": ["unused"],
    "source": {"dataset": "e9t/nsmc", "license": "cc0-1.0", "language": "ko"},
}


def scale(variant: str, **changes: Any) -> dict[str, Any]:
    """The method section of a SCALE run."""
    return scale_settings(variant, **changes).model_dump(mode="json")


def lora(**changes: Any) -> dict[str, Any]:
    """The method section of a run of LoRA."""
    settings = Lora.model_validate({"name": "lora", "rank": 2, "alpha": 3, **changes})
    return settings.model_dump(mode="json")


def zero(stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration in which every tensor is cut."""
    sharding = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    values = {"zero_optimization": {"stage": stage, "overlap_comm": False, **sharding, **more}}
    return values | (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        if dtype == "bf16"
        else {}
    )


Account = dict[str, dict[str, torch.Tensor]]
"""This rank's shards of each trained parameter in fp32 (`fp32`) and of its moments (`exp_avg`,
`exp_avg_sq`)."""


def save(
    base_path: Path,
    method: dict[str, Any],
    folder: Path,
    tp_size: int = 1,
    deepspeed_values: dict[str, Any] | None = None,
    steps: int = 2,
    noise: float = 0.05,
    *,
    account: bool = False,
) -> Account | None:
    """Trains a few steps (ZeRO-1 by default) and saves a checkpoint in `folder`; every rank must
    call
    it.

    With `account`, returns what this rank then holds, as DeepSpeed itself reads it.
    """
    import deepspeed

    from pipeline.checkpoint.manifest import describe_layout, describe_run
    from pipeline.checkpoint.position import Position
    from pipeline.deepspeed_config import load_deepspeed_config
    from pipeline.training.checkpointing import CheckpointManager
    from pipeline.training.engine import Engine

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layout = Layout(world_size, tp_size)
    groups = ProcessGroups(layout)
    config, json_path = (
        _config(base_path, method, folder, layout.dp_size),
        folder.parent / f"{folder.name}.{rank}.json",
    )
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(deepspeed_values or zero(1)))
    settings = load_deepspeed_config(json_path, layout)
    base = open_base(base_path)
    with default_dtype(settings.dtype):
        if starts_from_expansion(config.method):
            model = widened(base, config.method, tp=groups.tensor_parallel, noise=noise)
        else:
            model = started(base, config.method, groups.tensor_parallel)
            shake(model, noise)
    run = describe_run(config, base, model, "none")
    engine = Engine(model, config, settings, groups)
    for step in range(steps):
        tokens, targets = some_batch(base.spec, 1, SEQUENCE, seed=10 * step + layout.dp_rank(rank))
        engine.backward(engine._engine(tokens, targets)[0])
        engine.end_micro_batch(1e-2)
    held = _account(engine) if account else None
    record = describe_layout(layout, settings.zero_stage, settings.dtype)
    checkpoints = CheckpointManager(folder, run, record, config.checkpoints)
    saved = checkpoints.save(
        engine, Position(step=steps, tokens_seen=steps * SEQUENCE, seconds=1.0)
    )
    assert saved == checkpoint_in(folder, steps)
    return held


def _account(engine: Any) -> Account:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = engine._engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed makes its own views of the moments after the first group's step, before the
        # second group has any.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    held: Account = {"fp32": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in named_trained_parameters(engine.model):
        held["fp32"][name] = safe_get_full_fp32_param(parameter).clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            held[moment][name] = safe_get_full_optimizer_state(parameter, moment).clone()
    return held


def save_many(jobs: list[tuple[Any, ...]]) -> None:
    """Saves several checkpoints in the same processes; a job is the positional arguments of `save`."""
    for job in jobs:
        save(*job)


def checkpoint_in(folder: Path, steps: int = 2) -> Path:
    """Where `save` puts the checkpoint."""
    return folder / f"step_{steps:08d}"


def trained(base_path: Path, folder: Path) -> TrainedModel:
    """The model of the checkpoint that `save` made in `folder`."""
    return open_trained(checkpoint_in(folder), base_path)


def training_decoder(model: TrainedModel) -> Decoder:
    """The training model itself, in fp32."""
    return model.loaded(torch.float32, torch.device("cpu"))


def scale_config(**changes: Any) -> ScaleConfig:
    """Of a model of four layers with a rotary embedding."""
    rotary = {"frequencies": [1.0, 0.1, 0.01, 0.001], "long_frequencies": None, "context": None}
    rotaries = [rotary | {"attention_factor": 1.0}]
    return ScaleConfig(num_hidden_layers=4, rotary=rotaries, layer_rotary=[0] * 4, **changes)


def without_this_project(
    program: str, model: Path, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a program on an exported model, in `folder`, where nothing of this project can be
    imported."""
    absent = ("pipeline", "deepspeed", "orjson", "pydantic", "zstandard", "lm_eval", "datasets")
    program = f"import sys\nfor name in {absent}:\n    sys.modules[name] = None  # importing it is an error\n{program}"
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(model)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def generate_greedily(
    model: Any, tokens: torch.Tensor, *, new_tokens: int, **options: Any
) -> torch.Tensor:
    """An exported model's continuation by exactly `new_tokens`; every token is real unless options
    give a mask."""
    mask = options.pop("attention_mask", torch.ones_like(tokens))
    generated: torch.Tensor = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    return generated


def _config(
    base_path: Path, method: dict[str, Any], folder: Path, batch_size: int = 1
) -> RunConfig:
    values = {
        "name": "test",
        "folder": str(folder),
        "base": str(base_path),
        "method": method,
        "data": {"folder": "unused", "sequence_length": SEQUENCE, "corpora": {"new": CORPUS}},
        "schedule": {
            "steps": 2,
            "global_batch_size": batch_size,
            "micro_batch_size": 1,
            "learning_rate": 1e-2,
        },
        "deepspeed": "unused",
    }
    if method.get("open_gains") or method.get("open_rows") or method.get("low_rank"):
        values["gate"] = {}
        values["data"]["corpora"]["old"] = CORPUS | {"role": "replay"}
        values["data"]["replay_fraction"] = 0.5
    return parse_config(values, source="test")
