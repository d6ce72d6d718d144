"""What SCALE is compared with trains as SCALE does: resumed to the bit, moved to other layouts, and exported."""

from __future__ import annotations

import json
import shutil
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
from tests.training.runs import losses, make_run, metrics, train, train_and_look, write_config

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
def undisturbed(method, tokens, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """A run under ZeRO-3 on two tensor-parallel ranks, and what they held at its end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = make_run(folder, tokens, parallel__tp_size=2, **settings(method))
    return folder, run_ranks(train_and_look, 2, config)


@pytest.fixture(scope="module")
def stopped(method, tokens, tmp_path_factory) -> Path:
    """The same run, stopped in its first step."""
    folder = tmp_path_factory.mktemp("stopped")
    config = make_run(folder, tokens, parallel__tp_size=2, **settings(method))
    assert run_ranks(_stopped_in_the_first_step, 2, config) == [RESUME_LATER] * 2
    return folder


def _stopped_in_the_first_step(config):
    return train(config, stop=True)


def test_it_starts_at_the_base_and_learns(method, undisturbed):
    folder, ranks = undisturbed
    for rank in ranks:
        assert rank["step0_max_abs_logit_difference"] == (None if method == "freeze" else 0.0)
    perplexities = [line["perplexity/korean"] for line in metrics(folder) if "perplexity/korean" in line]
    assert perplexities[-1] < 0.99 * perplexities[0]
    drift = [name for name in metrics(folder)[-1] if name.startswith("kl_from_base/")]
    assert bool(drift) == (method != "freeze")


def test_it_goes_on_to_the_bit(method, tokens, undisturbed, stopped, tmp_path):
    config = _moved(stopped, tmp_path, tokens, method, zero=3, tp_size=2)
    assert run_ranks(train, 2, config) == [0, 0]
    assert metrics(tmp_path) == metrics(undisturbed[0])


@pytest.mark.parametrize(("zero", "world_size", "tp_size"), [(1, 2, 1), (2, 4, 4)])
def test_it_goes_on_at_another_layout(method, tokens, undisturbed, stopped, tmp_path, zero, world_size, tp_size):
    config = _moved(stopped, tmp_path, tokens, method, zero=zero, tp_size=tp_size)
    assert run_ranks(train, world_size, config) == [0] * world_size
    assert losses(tmp_path) == pytest.approx(losses(undisturbed[0]), rel=1e-6)


def test_its_checkpoint_holds_what_trained_and_leaves_for_transformers(method, stopped, tmp_path):
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
        assert all((one > 0) != (other > 0) for one, other in zip(base, added, strict=True))


def test_a_manifest_that_names_another_method_is_refused(stopped, method, tmp_path):
    manifest = stopped / "checkpoints" / "step_00000001" / "manifest.json"
    copied = shutil.copytree(manifest.parent, tmp_path / "copy")
    values = json.loads(manifest.read_text())
    values["run"]["method"] = {"name": "fft"}
    (copied / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"lacks .* more that its manifest's method has|holds .* more"):
        open_trained(copied, STORIES)


def _moved(stopped: Path, folder: Path, tokens: Path, method: str, *, zero: int, tp_size: int) -> Path:
    """A copy of the stopped run, with the configuration of another layout."""
    shutil.copytree(stopped, folder, dirs_exist_ok=True)
    return write_config(folder, tokens, zero=zero, parallel__tp_size=tp_size, **settings(method))
