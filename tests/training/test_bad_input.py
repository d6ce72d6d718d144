"""What a user can get wrong ends in one line that names it, and leaves nothing half-written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.bases import STORIES, save_stories_with_a_token_more
from tests.distributed import RankError, run_ranks
from tests.training.runs import make_run, train, write_config

PROJECT = Path(__file__).parents[2]


def refused(config: Path, error: str, message: str, world_size: int = 1) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(train, world_size, config)
    (line,) = (line for line in str(raised.value).splitlines() if line.startswith("pipeline.errors."))
    assert line.startswith(f"pipeline.errors.{error}: ")
    assert message in line


def test_the_command_line_prints_one_line_and_fails(tokens, tmp_path):
    config = write_config(tmp_path, tokens, schedule__stepz=3, method__l_fp=-1)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.train", str(config)],
        cwd=PROJECT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert "schedule.stepz: unknown key" in line
    assert "method.l_fp" in line
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_settings_that_name_what_is_not_there(tokens, tmp_path):
    refused(write_config(tmp_path, tokens, base=str(tmp_path / "none")), "BaseModelError", "none/config.json")
    refused(write_config(tmp_path, tokens, deepspeed="none.json"), "ConfigError", "none.json: no such file")
    refused(write_config(tmp_path, tmp_path / "none"), "DataError", "none/english/manifest.json")
    refused(write_config(tmp_path, tokens), "CheckpointError", "make one with tools/upscale.py")
    assert not (tmp_path / "checkpoints").exists()


def test_a_tokenizer_with_more_ids_than_the_base_has_rows(tokens, tmp_path):
    base = save_stories_with_a_token_more(tmp_path / "base")
    config = write_config(tmp_path, tokens, base=str(base), parallel__tp_size=2)
    refused(config, "BaseModelError", "has ids up to 512, but the base's vocab_size is 512", world_size=2)


def test_sizes_that_do_not_divide(tokens, tmp_path):
    config = write_config(tmp_path, tokens, schedule__global_batch_size=9)
    refused(config, "LayoutError", "nearest that do: 8, 10")
    refused(write_config(tmp_path, tokens, parallel__tp_size=3), "LayoutError", "sizes that do: 1", world_size=1)
    parallel = {"tp_size": 2, "sequence_parallel": True}
    config = write_config(tmp_path, tokens, parallel=parallel, data__sequence_length=33)
    refused(config, "LayoutError", "data.sequence_length: 33 does not divide by parallel.tp_size 2", world_size=2)


def test_more_steps_than_the_budget_allows(tokens, tmp_path):
    config = write_config(tmp_path, tokens, data__corpora__korean__token_budget=320)
    refused(config, "DataError", "use at most 1 steps")


@pytest.fixture
def trained(tokens, tmp_path):
    """A run of one step, and its configuration."""
    assert run_ranks(train, 1, make_run(tmp_path, tokens, zero=1, schedule__steps=1)) == [0]
    (tmp_path / "training.json").unlink()
    return tmp_path


def test_a_checkpoint_of_another_base_is_refused(tokens, trained, tmp_path):
    other = tmp_path / "other_base"
    shutil.copytree(STORIES, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(trained / "upscaled")
    config = make_run(trained, tokens, zero=1, base=str(other))
    refused(config, "CheckpointError", "had other weights than")


def test_a_checkpoint_of_another_run_is_refused(tokens, trained):
    config = write_config(trained, tokens, zero=1, data__replay_fraction=0.5)
    refused(config, "CheckpointError", "another data (replay_fraction expected 0.25, found 0.5)")
    config = write_config(trained, tokens, zero=1, method__norm="base")
    refused(config, "CheckpointError", "another method (norm expected 'separate', found 'base')")
