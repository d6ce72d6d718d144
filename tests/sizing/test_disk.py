"""The forecast of a checkpoint's size, compared with real checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.sizing.memory import checkpoint_bytes, checkpoints_bytes, held_bytes, most_checkpoints
from tests.distributed import run_ranks
from tests.training.runs import make_run, make_tokens, train

WIDE = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize("zero", [1, 3])
def test_a_checkpoint_is_as_large_as_forecast(zero, tokens, tmp_path):
    """Within a tenth: the forecast leaves out random states, names and padding, which matter in so small a model."""
    path = make_run(tmp_path, tokens, zero=zero, method__expansion=WIDE, schedule__steps=1)
    config = load_config(path)
    assert run_ranks(train, 2, path) == [0, 0]
    estimator = open_estimator(config, Cluster(2))
    forecast = checkpoint_bytes(estimator.parameters)
    assert held_bytes(tmp_path / "checkpoints" / "step_00000001") == pytest.approx(forecast, rel=0.1)
    assert most_checkpoints(config) == 3
    wanted = checkpoints_bytes(config, estimator.parameters)
    assert wanted == pytest.approx(3 * forecast * 1.1)
