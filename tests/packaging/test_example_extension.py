"""examples/extension, installed as a user would: its method trains, its format leaves verified."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.bases import STORIES
from tests.training.runs import make_tokens, write_config

pytestmark = pytest.mark.full

PROJECT = Path(__file__).parents[2]
METHOD = {"name": "attention", "first_layer": 2}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of packages into which pip has installed the example."""
    folder = tmp_path_factory.mktemp("extension")
    # A build writes beside the sources: a copy.
    source = shutil.copytree(PROJECT / "examples" / "extension", folder / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", folder / "packages"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *map(str, options), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "packages"


def scale_cpt(installed: Path, *words: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), str(PROJECT)])
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory) -> Path:
    """The configuration of a run that the example's method has trained."""
    folder = tmp_path_factory.mktemp("run")
    make_tokens(folder / "tokens")
    # The settings are checked where the example is installed alone: written as text, not parsed.
    run = write_config(folder / "run", folder / "tokens", zero=1, method=METHOD)
    done = scale_cpt(installed, "train", run)
    assert done.returncode == 0, done.stderr
    return run


def test_only_attention_trains_and_the_export_holds_what_it_learned(installed, trained, tmp_path):
    output = tmp_path / "vector"
    done = scale_cpt(installed, "convert", trained, "--format", "task_vector", "--output", output)
    assert done.returncode == 0, done.stderr
    assert "verified in float32" in done.stderr
    differences = load_file(output / "task_vector.safetensors")
    # Four maps in each of the layers 2, 3 and 4 of five.
    assert len(differences) == 12
    for name, difference in differences.items():
        assert ".self_attn." in name and int(name.split(".")[2]) >= 2
        assert torch.isfinite(difference).all() and difference.any()
    card = (output / "README.md").read_text()
    assert 'load_file(f"{folder}/task_vector.safetensors")' in card


def test_what_the_card_says_loads_the_model(installed, trained, tmp_path):
    sys.path.insert(0, str(installed))
    try:
        from scale_cpt_attention.task_vector import load_with_task_vector
    finally:
        sys.path.remove(str(installed))
    outputs = {}
    for name in ("task_vector", "merged"):
        output = outputs[name] = tmp_path / name
        done = scale_cpt(installed, "convert", trained, "--format", name, "--output", output)
        assert done.returncode == 0, done.stderr
    found = load_with_task_vector(STORIES, outputs["task_vector"], torch.float32)
    from pipeline.hf.load import load_hf_model

    merged = load_hf_model(outputs["merged"], torch.float32)
    tokens = torch.arange(2, 34).view(1, -1)
    with torch.no_grad():
        expected = merged(tokens).logits
        assert torch.allclose(found(tokens).logits, expected, atol=1e-5)
        assert not torch.allclose(load_hf_model(STORIES)(tokens).logits, expected, atol=1e-2)


def test_its_faults_end_in_one_line_and_without_it_the_method_is_unknown(installed, trained):
    done = scale_cpt(installed, "train", trained, "--set", "method.first_layer=9", "--dry-run")
    assert "method.first_layer: expected at most 4, the base's last layer, found 9" in done.stdout
    alone = subprocess.run(
        [sys.executable, "-m", "pipeline", "train", str(trained)],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 2
    *_, error = alone.stderr.splitlines()
    assert "attention" in error and "Traceback" not in alone.stderr
