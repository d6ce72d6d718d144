"""The baselines train as SCALE does: resumed exactly, moved to other layouts, and exported."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.trained_model import as_text, describe_checkpoint, open_trained
from pipeline.conversion.verify import probe_maker
from pipeline.errors import RESUME_LATER, CheckpointError
from pipeline.parallel.sharding import named_trained_parameters
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, metrics, train, train_and_look, write_config

METHODS: dict[str, dict[str, Any]] = {
    "freeze": {"name": "freeze", "frozen_layers": 2},
    "lora": {"name": "lora", "rank": 4},
    "llama_pro": {"name": "llama_pro", "added_layers": 5},
}
STEPS = 3


def settings(method: str) -> dict[str, Any]:
    return {"method": METHODS[method], "schedule__steps": STEPS, "schedule__learning_rate": 1e-3}


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Of each method a run under ZeRO-3 on two tensor-parallel ranks with what they held at its end, and the same run
    stopped in its first step."""
    folder = tmp_path_factory.mktemp("runs")
    jobs: list[Any] = []
    for name in METHODS:
        for kind, job in (("undisturbed", train_and_look), ("stopped", partial(train, stop=True))):
            jobs.append(partial(job, make_run(folder / kind / name, tokens, parallel__tp_size=2, **settings(name))))
    by_job = list(zip(*run_ranks(in_turn, 2, jobs), strict=True))
    assert by_job[1::2] == [(RESUME_LATER, RESUME_LATER)] * len(METHODS)
    return {
        name: {"undisturbed": folder / "undisturbed" / name, "stopped": folder / "stopped" / name, "ranks": ranks}
        for name, ranks in zip(METHODS, by_job[::2], strict=True)
    }


@pytest.fixture
def undisturbed(runs, method) -> Path:
    return runs[method]["undisturbed"]


@pytest.fixture
def stopped(runs, method) -> Path:
    return runs[method]["stopped"]


LAYOUTS = {"same": (3, 2, 2), "ZeRO-1": (1, 2, 1), "four ranks": (2, 4, 4)}
"""ZeRO stage, ranks, tensor-parallel size."""


@pytest.fixture(scope="module")
def resumed(runs, tokens, tmp_path_factory) -> Path:
    """The folder of the stopped runs' copies, by layout and method, each resumed there to its end."""
    folder = tmp_path_factory.mktemp("resumed")
    for world_size in (2, 4):
        jobs = []
        for layout, (zero, ranks, tp_size) in LAYOUTS.items():
            for name in METHODS if ranks == world_size else ():
                copy = shutil.copytree(runs[name]["stopped"], folder / layout / name)
                config = write_config(copy, tokens, zero=zero, parallel__tp_size=tp_size, **settings(name))
                jobs.append(partial(train, config))
        assert run_ranks(in_turn, world_size, jobs) == [[0] * len(jobs)] * world_size
    return folder


def test_it_starts_at_the_base_and_learns(method, runs, undisturbed):
    for rank in runs[method]["ranks"]:
        assert rank["step0_max_abs_logit_difference"] == (None if method == "freeze" else 0.0)
    perplexities = [line["perplexity/korean"] for line in metrics(undisturbed) if "perplexity/korean" in line]
    assert perplexities[-1] < 0.99 * perplexities[0]
    drift = [name for name in metrics(undisturbed)[-1] if name.startswith("kl_from_base/")]
    assert bool(drift) == (method != "freeze")


def test_it_resumes_to_the_bit(method, undisturbed, resumed):
    assert metrics(resumed / "same" / method) == metrics(undisturbed)


@pytest.mark.parametrize("layout", ["ZeRO-1", "four ranks"])
def test_it_resumes_at_another_layout(method, undisturbed, resumed, layout):
    assert losses(resumed / layout / method) == pytest.approx(losses(undisturbed), rel=1e-6)


def test_its_checkpoint_holds_what_trained_and_converts_for_transformers(method, stopped, tmp_path):
    checkpoint = stopped / "checkpoints" / "step_00000001"
    model = open_trained(checkpoint, STORIES)
    assert model.trained == {name for name, _ in named_trained_parameters(model.structure)} != set(model.shapes)
    for format in ("auto", "peft") if method == "lora" else ("auto",):
        output = tmp_path / format
        assert convert(Conversion(checkpoint, STORIES, output, format=format), probe_maker({}))
        report = json.loads((output / "verification.json").read_text())
        assert report["top1_agreement"] > 0.99 and report["kl"] < 1e-6

    facts = describe_checkpoint(checkpoint)
    assert facts["trainable_parameters"] == sum(model.read(name).numel() for name in model.trained)
    kinds = {"freeze": {"base"}, "lora": {"base", "adapter.a", "adapter.b"}, "llama_pro": {"base", "added layer"}}
    assert set(facts["norms"]) == kinds[method]
    assert f"method    name {method}" in as_text(facts)
    if method == "llama_pro":
        base, added = facts["norms"]["base"], facts["norms"]["added layer"]
        assert all((of_base > 0) != (of_added > 0) for of_base, of_added in zip(base, added, strict=True))


def test_a_manifest_that_names_another_method_is_refused(stopped, method, tmp_path):
    manifest = stopped / "checkpoints" / "step_00000001" / "manifest.json"
    copied = shutil.copytree(manifest.parent, tmp_path / "copy")
    values = json.loads(manifest.read_text())
    values["run"]["method"] = {"name": "fft"}
    (copied / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"lacks .* more that its manifest's method has|holds .* more"):
        open_trained(copied, STORIES)
