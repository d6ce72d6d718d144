"""Muon: its update is torch's, for which matrices, and what is refused. Its runs are rows of
`journeys.py`.
"""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from torch import nn

from pipeline.checks.checklist import check_stage
from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.model.decoder import is_layer_matrix
from pipeline.optimizers.muon import orthogonalised
from pipeline.training import deepspeed_internals  # noqa: F401  # it sets the filter
from tests.training.runs import make_run


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (24, 24)])
def test_a_matrix_is_orthogonalised_as_by_torch(shape):
    torch.manual_seed(1)
    gradient = torch.randn(shape)
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Muon(
        [weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw"
    )
    weight.grad = gradient.clone()
    optimizer.step()
    found = orthogonalised(gradient)
    assert torch.allclose(weight / (-0.2 * math.sqrt(max(shape))), found.float(), atol=0.05)
    singular = torch.linalg.svdvals(found.float())
    assert singular.min() > 0.6 and singular.max() < 1.3
    both = orthogonalised(torch.stack([gradient, -gradient]))
    assert torch.allclose(both[0], found, atol=1e-3), (
        "each of several matrices alone; a product may sum otherwise"
    )
    assert not orthogonalised(torch.zeros(shape)).any()


def test_routers_and_rows_are_no_matrices_of_muon():
    weights = {
        "layers.0.ffn.base.router.weight": (8, 16),
        "layers.0.ffn.base.shared.weight": (1, 16),
    }
    weights |= {
        "embedding.base.weight": (32, 16),
        "output.base": (32, 16),
        "embedding.new_rows.weight": (4, 16),
        "own_input.rows.weight": (4, 16),
        "output.own_rows": (4, 16),
        "layers.0.ffn_norm.own.weight": (16,),
        "layers.0.attention.query.base.bias": (16,),
    }
    assert not any(is_layer_matrix(name, torch.empty(shape)) for name, shape in weights.items())
    assert is_layer_matrix("layers.0.ffn.base.experts.up.weight", torch.empty(8, 16, 16))
    assert is_layer_matrix("layers.0.ffn.up.adapter.a", torch.empty(2, 16))


@pytest.mark.parametrize(
    "setting", [{"offload_optimizer": {"device": "cpu"}}, {"mics_shard_size": 2}]
)
def test_what_cannot_be_put_together_is_refused_by_name(tokens, tmp_path, setting):
    config = make_run(tmp_path, tokens, zero=3, schedule__optimizer="muon")
    (file,) = tmp_path.glob("zero*.json")
    values = json.loads(file.read_text())
    file.write_text(json.dumps({"zero_optimization": values["zero_optimization"] | setting}))
    with pytest.raises(
        ConfigError, match=r"schedule\.optimizer: expected adamw, found muon with .*" + min(setting)
    ):
        check_stage(load_config(config), 2, "train")


def test_deepspeed_does_not_warn_of_an_optimizer_that_the_project_tests():
    logger = logging.getLogger("DeepSpeed")
    kept = ["proceed with caution: a lock is held"]
    found = [
        message
        for message in ("You are using ZeRO with an untested optimizer", *kept)
        if logger.filter(logging.makeLogRecord({"msg": message}))
    ]
    assert found == kept
