"""A run resumes at another tensor-parallel size, number of ranks and ZeRO stage, with the same losses."""

from __future__ import annotations

import json
from functools import partial
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
from tests.training.runs import in_turn, losses, make_run, prepared, start_deepspeed, train, write_config

SETTINGS: dict[str, Any] = {
    "schedule__steps": 4,
    "schedule__weight_decay": 0.1,
    "schedule__learning_rate": 1e-3,
}
LAYOUTS = [(3, 4, 2), (1, 2, 1), (2, 4, 4)]
"""ZeRO stage, ranks, tensor-parallel size: of the first step, the second, and the following ones."""
OTHER_LAYOUTS = [(2, 1, 1, "fp32"), (3, 2, 1, "fp32"), (2, 2, 2, "fp32"), (1, 2, 1, "bf16"), (3, 4, 2, "bf16")]
"""Where the state after two steps is compared."""


@pytest.fixture(scope="module")
def moved(tokens, tmp_path_factory) -> Path:
    """A run with one step at each of two layouts, before its third step."""
    folder = tmp_path_factory.mktemp("moved")
    make_run(folder, tokens, **SETTINGS)
    for zero, world_size, tp_size in LAYOUTS[:2]:
        config = write_config(folder, tokens, zero=zero, parallel__tp_size=tp_size, **SETTINGS)
        assert run_ranks(partial(train, stop=True), world_size, config) == [RESUME_LATER] * world_size
    return folder


@pytest.fixture(scope="module")
def resumed(tokens, moved, tmp_path_factory) -> dict[tuple[int, int, int, str], list[dict[str, Any]]]:
    """What each rank holds right after `moved` was resumed, at each of the other layouts. Then `moved` ends at the last
    of its own, and the same run has also been trained on one rank, in the folder "undisturbed"."""
    undisturbed = make_run(moved / "undisturbed", tokens, zero=1, schedule__micro_batch_size=8, **SETTINGS)
    last_zero, last_world_size, last_tp_size = LAYOUTS[2]
    last_settings = {"parallel__tp_size": last_tp_size, **SETTINGS}
    last = write_config(moved, tokens, zero=last_zero, name="last.yaml", **last_settings)
    held = {}
    for world_size, job in ((1, partial(train, undisturbed)), (2, None), (last_world_size, partial(train, last))):
        layouts = [layout for layout in OTHER_LAYOUTS if layout[1] == world_size]
        jobs: list[Any] = [partial(_resume_and_look, _config(moved, tokens, *layout)) for layout in layouts]
        by_job = list(zip(*run_ranks(in_turn, world_size, [*jobs, *([job] if job else [])]), strict=True))
        held |= {layout: list(ranks) for layout, ranks in zip(layouts, by_job, strict=False)}
        assert job is None or by_job[-1] == (0,) * world_size
    return held


def _config(moved: Path, tokens: Path, zero: int, world_size: int, tp_size: int, dtype: str) -> Path:
    """The configuration by which `moved` resumes at another layout."""
    name = f"zero{zero}_{world_size}_{tp_size}_{dtype}"
    settings = {"deepspeed": f"{moved}/{name}.json", "parallel__tp_size": tp_size, **SETTINGS}
    config = write_config(moved, tokens, zero=zero, name=f"{name}.yaml", **settings)
    deepspeed_values = json.loads((moved / f"zero{zero}.json").read_text())
    if dtype == "bf16":
        deepspeed_values |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    (moved / f"{name}.json").write_text(json.dumps(deepspeed_values))
    return config


@pytest.mark.parametrize("layout", OTHER_LAYOUTS, ids=str)
def test_the_state_is_the_same_at_every_layout(moved, resumed, layout):
    reader = CheckpointReader(moved / "checkpoints" / "step_00000002", _model(moved / "run.yaml"))
    ranks, tp_size = resumed[layout], layout[2]
    for name in reader.names:
        partition = ranks[0]["partitions"][name]
        size = reader.read(name).shape[partition.dim or 0]
        for kind in ("fp32", "exp_avg", "exp_avg_sq", "model"):
            whole = merge([rank[kind][name] for rank in ranks[:tp_size]], partition, size)
            expected = reader.read(name) if kind in ("fp32", "model") else reader.read(name, kind)
            assert torch.equal(whole, expected.to(whole.dtype)), (name, kind)
    for rank in ranks:
        assert rank["adam_steps"] == {2.0}
        assert rank["position"] == (2, 2 * 8 * 32)
        assert rank["groups"] == [(0.1, (0.9, 0.95)), (0.0, (0.9, 0.95))]


def test_moving_over_three_layouts_changes_no_loss(moved, resumed):
    assert losses(moved) == pytest.approx(losses(moved / "undisturbed"), rel=1e-6)
    assert losses(moved)[-1] != losses(moved)[0]


def _resume_and_look(path: Path) -> dict[str, Any]:
    """The state of this rank's engine right after it resumed, from DeepSpeed's own functions."""
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
        moment: {name: safe_get_full_optimizer_state(weight, moment).clone() for name, weight in named.items()}
        for moment in ("exp_avg", "exp_avg_sq")
    }
    return {
        **moments,
        "fp32": {name: safe_get_full_fp32_param(weight).clone() for name, weight in named.items()},
        "model": model,
        "partitions": {name: weight.tp_partition for name, weight in named.items()},
        "adam_steps": {float(slots["step"]) for slots in optimizer.optimizer.state.values()},
        "position": (position.step, position.tokens_seen),
        "groups": [(group["weight_decay"], tuple(group["betas"])) for group in optimizer.param_groups],
    }


def _model(config: Path):
    from pipeline import methods

    with torch.device("meta"):
        return methods.build_model(load_config(config), open_base(STORIES).spec, SINGLE)
