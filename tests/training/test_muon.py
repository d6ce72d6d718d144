"""Muon: its update is torch's, whatever ZeRO and tensor parallelism cut; runs resume to the bit and move."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.checkpoint.rank_files import read_index
from pipeline.checks.door import read_inputs
from pipeline.config.run import load_config
from pipeline.errors import RESUME_LATER, CheckpointError, ConfigError
from pipeline.model.decoder import is_layer_matrix
from pipeline.training.muon import orthogonalised
from tests.distributed import run_ranks
from tests.training.journeys import DP2, DP2_TP2, METHODS, MOVES_TO, TP2, Layout
from tests.training.runs import in_turn, losses, make_run, metrics, train, train_and_look, write_config

STEPS = 3
ROUNDING = 1e-4  # another layout reorders sums, and orthogonalising enlarges what differs in small directions
ROWS = [
    ("adapt", 1, DP2),
    pytest.param(("fft", 2, TP2), marks=pytest.mark.full),
    pytest.param(("lora", 3, DP2), marks=pytest.mark.full),
    pytest.param(("adapt", 3, DP2_TP2), marks=pytest.mark.full),
]
NAMES = ["adapt, ZeRO-1", "fft, ZeRO-2, tp 2", "lora, ZeRO-3", "adapt, ZeRO-3, tp 2"]


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (24, 24)])
def test_a_matrix_is_orthogonalised_as_by_torch(shape):
    torch.manual_seed(1)
    gradient = torch.randn(shape)
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw")
    weight.grad = gradient.clone()
    optimizer.step()
    found = orthogonalised(gradient)
    assert torch.allclose(weight / (-0.2 * math.sqrt(max(shape))), found.float(), atol=0.05)
    singular = torch.linalg.svdvals(found.float())
    assert singular.min() > 0.6 and singular.max() < 1.3
    both = orthogonalised(torch.stack([gradient, -gradient]))
    assert torch.allclose(both[0], found, atol=1e-3), "each of several matrices alone; a product may sum otherwise"
    assert not orthogonalised(torch.zeros(shape)).any()


def settings(method: str, zero: int, layout: Layout) -> dict[str, Any]:
    return {
        "zero": zero,
        "method": METHODS[method],
        "parallel__tp_size": layout.tp_size,
        "schedule__optimizer": "muon",
        "schedule__steps": STEPS,
        "schedule__learning_rate": 1e-4 if method == "fft" else 1e-3,
        "checkpoints": {"every_steps": 1},
    }


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory) -> Any:
    """By row, its folder with the runs `undisturbed`, `resumed` and `moved`, and what the first one's ranks held."""
    folder = tmp_path_factory.mktemp("muon")
    found: dict[Any, Any] = {}

    def runs(row: tuple[str, int, Layout]) -> tuple[Path, dict[str, Any]]:
        if row not in found:
            method, zero, layout = row
            own = folder / str(len(found))
            first, stopped = (make_run(own / name, tokens, **settings(*row)) for name in ("undisturbed", "stopped"))
            jobs = [partial(train_and_look, first), partial(train, stopped, stop=True)]
            results = run_ranks(in_turn, layout.ranks, jobs)
            assert [result[1] for result in results] == [RESUME_LATER] * layout.ranks
            then = defaultdict(list)
            for name, place, stage in (("resumed", layout, zero), ("moved", MOVES_TO[layout], 4 - zero)):
                shutil.copytree(own / "stopped", own / name)
                config = write_config(own / name, tokens, **settings(method, stage, place))
                then[place.ranks].append(partial(train, config))
            for ranks, again in then.items():
                assert run_ranks(in_turn, ranks, again) == [[0] * len(again)] * ranks
            found[row] = own, results[0][0]
        return found[row]

    return runs


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_run_resumes_to_the_bit_and_moves_to_another_layout(trained, row):
    folder, held = trained(row)
    assert metrics(folder / "resumed") == metrics(folder / "undisturbed")
    assert losses(folder / "moved") == pytest.approx(losses(folder / "undisturbed"), rel=ROUNDING)
    last = f"checkpoints/step_{STEPS:08d}"
    written = [folder / name / last / "rank_00000.safetensors" for name in ("resumed", "undisturbed")]
    assert written[0].read_bytes() == written[1].read_bytes()
    assert len(losses(folder / "stopped")) == 1
    elements = sum(by_muon(folder / "undisturbed").values())
    assert 0 < elements <= held["trainable_parameters"]
    if row[2].tp_size == 1:
        assert held["optimizer_state_elements"] == 2 * held["trainable_parameters"] - elements


def by_muon(run: Path) -> dict[str, int]:
    """The elements of each parameter of which the last checkpoint of `run` holds one moment only."""
    found: dict[str, int] = defaultdict(int)
    for file in (run / "checkpoints" / f"step_{STEPS:08d}").glob("rank_*.safetensors"):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        for name in json.loads(header["__metadata__"]["layout"])["first"]:
            if f"{name}/exp_avg_sq" not in header:
                found[name] += header[f"{name}/exp_avg"]["shape"][0]
    return found


def test_only_matrices_within_layers_are_muons(trained):
    run = trained(("fft", 2, TP2))[0] / "undisturbed"
    names = {name for name, _ in read_index(run / "checkpoints" / f"step_{STEPS:08d}").parts}
    assert set(by_muon(run)) == {name for name in names if name.startswith("layers.") and "norm" not in name}
    assert "embedding.base.weight" in names


def test_routers_and_rows_are_no_matrices_of_muon():
    weights = {"layers.0.ffn.base.router.weight": (8, 16), "layers.0.ffn.base.shared.weight": (1, 16)}
    weights |= {
        "output.base": (32, 16),
        "embedding.new_rows.weight": (4, 16),
        "layers.0.attention.query.base.bias": (16,),
    }
    assert not any(is_layer_matrix(name, torch.empty(shape)) for name, shape in weights.items())
    assert is_layer_matrix("layers.0.ffn.base.experts.up.weight", torch.empty(8, 16, 16))


@pytest.mark.parametrize("setting", [{"offload_optimizer": {"device": "cpu"}}, {"mics_shard_size": 2}])
def test_what_cannot_be_put_together_is_refused_by_name(tokens, tmp_path, setting):
    config = make_run(tmp_path, tokens, zero=3, schedule__optimizer="muon")
    (file,) = tmp_path.glob("zero*.json")
    values = json.loads(file.read_text())
    file.write_text(json.dumps({"zero_optimization": values["zero_optimization"] | setting}))
    with pytest.raises(ConfigError, match=r"schedule\.optimizer: expected adamw, found muon with .*" + min(setting)):
        read_inputs(load_config(config), 2)


def test_a_run_keeps_its_optimizer(trained, tokens, tmp_path):
    folder, _ = trained(("adapt", 1, DP2))
    shutil.copytree(folder / "stopped", tmp_path / "run")
    config = write_config(tmp_path / "run", tokens, **settings("adapt", 1, DP2) | {"schedule__optimizer": "adamw"})
    with pytest.raises(CheckpointError, match=r"another optimizer \(expected 'muon', found 'adamw'\)"):
        read_inputs(load_config(config), 2)
