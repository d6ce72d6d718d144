"""The benchmark of an export's weights in 16 and in 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import export_precision, serve_check
from pipeline.errors import ConfigError
from tests.bases import STORIES
from tests.benchmarks.calls import rows_of
from tests.extensions.gate.test_catching_up import gated

pytestmark = pytest.mark.full


def test_each_row_is_rounded_by_its_own_scale():
    layer = nn.Linear(16, 3, bias=False)
    with torch.no_grad():
        layer.weight[1] *= 100
        layer.weight[2] = 0
    before = layer.weight.detach().clone()
    export_precision.round_to_int8(nn.Sequential(layer))
    scale = before.abs().amax(1, keepdim=True) / 127
    assert ((layer.weight - before).abs() <= scale / 2 + 1e-7).all()
    assert torch.equal(layer.weight[2], before[2])
    steps = layer.weight[:2] / scale[:2]
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("name", ["lm_head", "embed_out"])
def test_the_output_projection_stays_as_it_is(name):
    model = nn.Module()
    model.add_module(name, nn.Linear(16, 3, bias=False))
    export = nn.Module()
    export.base = model
    before = model.get_submodule(name).weight.detach().clone()
    for whole in (model, export):
        export_precision.round_to_int8(whole)
        assert torch.equal(model.get_submodule(name).weight, before)


def test_ids_that_are_open_count_as_open():
    model = gated("open ids", -30.0)
    ids = torch.tensor([1, 5, 2, 45, 3, 7, 5, 8])
    opens = export_precision.score(model, ids, 4).opens
    assert opens.tolist() == [False, True, False, True, False, False, True, False]
    assert not model.token_gate._forward_hooks


def test_perplexities_of_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve_check, "MAX_BYTES", 2**11)
    rows = rows_of(export_precision, tmp_path, monkeypatch, STORIES)
    assert [row["weights"] for row in rows] == list(export_precision.WEIGHTS)
    assert rows[0]["change"] == 0.0
    assert 0 < abs(rows[1]["change"]) < 0.01 and 0 < abs(rows[2]["change"]) < 0.03
    assert "int8" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="expected at least 4096 tokens"):
        export_precision.measure(STORIES, "Once upon a time", 4096)
