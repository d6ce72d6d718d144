"""`scale-cpt upscale` as a user runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.expansion_folder import MANIFEST, open_expansion
from tests.bases import STORIES
from tests.files import flip_bit
from tests.programs import scale_cpt
from tests.training.runs import write_config


def upscale(config: Path) -> tuple[int, str]:
    """The exit code, and the messages."""
    done = scale_cpt("upscale", config)
    return done.returncode, done.stderr


def test_the_first_run_writes_and_the_second_skips(tmp_path):
    code, output = upscale(write_config(tmp_path / "run", tmp_path))
    assert code == 0, output
    assert "wrote the initial expansion to" in output.splitlines()[-1]
    manifest = tmp_path / "run" / "initial_expansion" / MANIFEST
    assert "embedding.expansion.weight" in open_expansion(manifest.parent).names
    written = manifest.stat().st_mtime_ns
    code, output = upscale(write_config(tmp_path / "run", tmp_path))
    assert code == 0
    assert "is there already" in output
    assert manifest.stat().st_mtime_ns == written
    flip_bit(manifest.parent / "expansion-00001.safetensors", -1)
    code, output = upscale(write_config(tmp_path / "run", tmp_path))
    assert code == 1
    assert "expansion-00001.safetensors: damaged" in output


@pytest.mark.parametrize(
    "how", ["another folder", "other weights in the same folder", "another seed"]
)
def test_another_base_is_refused_also_once_training_has_begun(tmp_path, how):
    base = shutil.copytree(STORIES, tmp_path / "base")
    config = write_config(tmp_path / "run", tmp_path, base=str(base))
    assert upscale(config)[0] == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    code, output = upscale(config)
    assert code == 0 and "and training has begun" in output

    changes = {"base": str(base)}
    if how == "another seed":
        changes["seed"] = 8
    else:
        other = base if how.startswith("other") else shutil.copytree(base, tmp_path / "other")
        flip_bit(other / "model.safetensors", -1)
        changes["base"] = str(other)
    code, output = upscale(write_config(tmp_path / "run", tmp_path, **changes))
    assert code == 1
    expected = (
        "made with another seed"
        if how == "another seed"
        else f"made of the base {base} with other weights"
    )
    assert expected in output


def test_a_missing_expansion_to_continue_from_is_refused(tmp_path):
    code, output = upscale(
        write_config(tmp_path, tmp_path, init_expansion=str(tmp_path / "elsewhere"))
    )
    assert code == 2
    assert (
        "elsewhere: holds no expansion; convert the run to train on with --format expansion"
        in output
    )
    assert not (tmp_path / "elsewhere").exists()
