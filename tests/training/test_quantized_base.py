"""Runs on a base in 8 or 4 bits: they start at it exactly, resume at other layouts, and export the published base."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.verify import probe_maker
from pipeline.errors import RESUME_LATER
from pipeline.model.from_hf import open_base
from pipeline.parallel.quantized import quantization_of, rounded
from pipeline.parallel.sharding import partition_of, split
from pipeline.scale.layers import base_maps
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, prepared, start_deepspeed, train, write_config

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "adapt fp8": (1, {"base_precision": "fp8", "activation_checkpointing": "all"}),
    "adapt nf4": (2, {"base_precision": "nf4"}),
    "lora nf4": (2, {"base_precision": "nf4", "method": {"name": "lora", "rank": 4}}),
}
"""ZeRO stage and settings."""
STEPS = {"schedule__steps": 3}


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory) -> Path:
    """The folder of the runs: whole, and stopped in the first step and resumed at another layout."""
    folder = tmp_path_factory.mktemp("quantized")
    first: list[Any] = []
    then: list[Any] = []
    for name, (zero, settings) in RUNS.items():
        for kind in ("whole", "resumed"):
            config = make_run(folder / kind / name, tokens, zero=zero, **STEPS, **settings)
            first.append(partial(train, config, stop=kind == "resumed"))
        # nf4's blocks do not fit the FFN of stories260K on two tensor-parallel ranks.
        layout = {"parallel__tp_size": 2} if "fp8" in name else {}
        config = write_config(folder / "resumed" / name, tokens, zero=3 - zero, **STEPS, **settings, **layout)
        then += [partial(_base_of, config), partial(train, config)]
    assert run_ranks(in_turn, 2, first) == [[0, RESUME_LATER] * len(RUNS)] * 2
    ranks = run_ranks(in_turn, 2, then)
    assert [rank[1::2] for rank in ranks] == [[0] * len(RUNS)] * 2
    torch.save([dict(zip(RUNS, rank[::2], strict=True)) for rank in ranks], folder / "bases.pt")
    return folder


def _base_of(config: Path) -> dict[str, Any]:
    """This rank's shards of the base as a resumed run computes with them."""
    start_deepspeed()
    trainer, *_ = prepared(config)
    trainer.observers.on_end(finished=True)
    weights = {path: module.weight for path, module in base_maps(trainer.engine.model).items()}
    return {
        path: (quantization_of(weight).decode(weight, torch.float32), partition_of(weight))
        for path, weight in weights.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_it_starts_at_its_quantised_base_and_learns(runs, name):
    record = json.loads((runs / "whole" / name / "training.json").read_text())
    assert record["step0_max_abs_logit_difference"] == 0.0
    assert losses(runs / "whole" / name)[2] < losses(runs / "whole" / name)[1]
    # The base knows English, so that rounding can only harm there.
    assert 0 < record["quantization_cost"]["english"] < (0.05 if "fp8" in name else 0.5)
    assert set(record["quantization_cost"]) == {"english", "korean"}


@pytest.mark.parametrize("name", RUNS)
def test_it_resumes_at_another_layout_on_the_same_base(runs, name):
    assert losses(runs / "resumed" / name) == pytest.approx(losses(runs / "whole" / name), rel=1e-6)
    precision, tp_size = RUNS[name][1]["base_precision"], 2 if "fp8" in name else 1
    base = open_base(STORIES)
    for rank, held_by_rank in enumerate(torch.load(runs / "bases.pt", weights_only=False)):
        for path, (held, partition) in held_by_rank[name].items():
            whole = rounded(base.read(f"{path}.weight"), precision)
            assert torch.equal(held, split(whole, partition, rank % tp_size, tp_size))


@pytest.mark.parametrize("name", RUNS)
def test_it_is_exported_with_the_base_as_published(runs, name, tmp_path):
    checkpoint = runs / "whole" / name / "checkpoints" / "step_00000003"
    assert convert(Conversion(checkpoint, STORIES, tmp_path / "hf"), probe_maker({}))
    report = json.loads((tmp_path / "hf" / "verification.json").read_text())
    for text in report["texts"].values():
        assert text["exported_perplexity"] == pytest.approx(text["training_perplexity"], rel=1e-4)
        assert text["quantized_base_perplexity"] != pytest.approx(text["training_perplexity"], rel=1e-4)
    assert json.loads((tmp_path / "hf" / "conversion.json").read_text())["base_precision"] in name
