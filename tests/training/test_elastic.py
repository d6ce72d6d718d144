"""A run goes on at another tensor-parallel size, number of ranks and ZeRO stage, as if nothing had changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.reader import CheckpointReader
from pipeline.config.run import load_config
from pipeline.errors import RESUME_LATER
from pipeline.model.from_hf import open_base
from pipeline.parallel.sharding import merge, named_trained_parameters
from pipeline.parallel.topology import SINGLE
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.training.runs import losses, make_run, prepared, start_deepspeed, train, write_config

SETTINGS: dict[str, Any] = {"schedule__weight_decay": 0.1, "schedule__learning_rate": 1e-3}
LAYOUTS = [(3, 4, 2), (1, 2, 1), (2, 4, 4)]
"""ZeRO stage, ranks, tensor-parallel size."""


def _stopped_in_the_first_step(config):
    return train(config, stop=True)


@pytest.fixture(scope="module")
def moved(tokens, tmp_path_factory) -> Path:
    """A run that made one step at each of two layouts, and stands before its third."""
    folder = tmp_path_factory.mktemp("moved")
    make_run(folder, tokens, **SETTINGS)
    for zero, world_size, tp_size in LAYOUTS[:2]:
        config = write_config(folder, tokens, zero=zero, parallel__tp_size=tp_size, **SETTINGS)
        assert run_ranks(_stopped_in_the_first_step, world_size, config) == [RESUME_LATER] * world_size
    return folder


def test_the_state_is_the_same_at_every_layout(tokens, moved):
    reader = CheckpointReader(moved / "checkpoints" / "step_00000002", _model(moved / "run.yaml"))
    for zero, world_size, tp_size, dtype in [
        (2, 1, 1, "fp32"), (3, 2, 1, "fp32"), (2, 2, 2, "fp32"), (1, 2, 1, "bf16"), (3, 4, 2, "bf16"),
    ]:  # fmt: skip
        config = write_config(moved, tokens, zero=zero, parallel__tp_size=tp_size, **SETTINGS)
        if dtype == "bf16":
            file = load_config(config).deepspeed
            more = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
            file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
        ranks = run_ranks(_resume_and_look, world_size, config)
        for name in reader.names:
            partition = ranks[0]["partitions"][name]
            size = reader.read(name).shape[partition.dim or 0]
            for kind in ("fp32", "exp_avg", "exp_avg_sq", "model"):
                whole = merge([rank[kind][name] for rank in ranks[:tp_size]], partition, size)
                expected = reader.read(name) if kind in ("fp32", "model") else reader.read(name, kind)
                assert torch.equal(whole, expected.to(whole.dtype)), (zero, world_size, tp_size, dtype, name, kind)
        for rank in ranks:
            assert rank["adam_steps"] == {2.0}
            assert rank["position"] == (2, 2 * 8 * 32)
            assert rank["groups"] == [(0.1, (0.9, 0.95)), (0.0, (0.9, 0.95))]


def test_moving_over_three_layouts_changes_no_loss(tokens, moved, tmp_path):
    zero, world_size, tp_size = LAYOUTS[2]
    config = write_config(moved, tokens, zero=zero, parallel__tp_size=tp_size, **SETTINGS)
    assert run_ranks(train, world_size, config) == [0] * world_size
    undisturbed = make_run(tmp_path, tokens, zero=1, schedule__micro_batch_size=8, **SETTINGS)
    assert run_ranks(train, 1, undisturbed) == [0]
    assert losses(moved) == pytest.approx(losses(tmp_path), rel=1e-6)
    assert losses(moved)[-1] != losses(moved)[0]


def _resume_and_look(path: Path) -> dict[str, Any]:
    """What this rank's engine holds right after it resumed, by DeepSpeed's own account."""
    start_deepspeed()
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    trainer, position, _ = prepared(path)
    trainer.observers.on_end(finished=True)
    engine, optimizer = trainer.engine, trainer.engine._engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()
    named = dict(named_trained_parameters(engine.model))
    with deepspeed.zero.GatheredParameters(list(named.values())):
        model = {name: parameter.detach().clone() for name, parameter in named.items()}
    moments = {
        moment: {name: safe_get_full_optimizer_state(one, moment).clone() for name, one in named.items()}
        for moment in ("exp_avg", "exp_avg_sq")
    }
    return {
        **moments,
        "fp32": {name: safe_get_full_fp32_param(one).clone() for name, one in named.items()},
        "model": model,
        "partitions": {name: one.tp_partition for name, one in named.items()},
        "adam_steps": {float(slots["step"]) for slots in optimizer.optimizer.state.values()},
        "position": (position.step, position.tokens_seen),
        "groups": [(group["weight_decay"], tuple(group["betas"])) for group in optimizer.param_groups],
    }


def _model(config: Path):
    from pipeline import methods

    with torch.device("meta"):
        return methods.build_model(load_config(config), open_base(STORIES), SINGLE)
