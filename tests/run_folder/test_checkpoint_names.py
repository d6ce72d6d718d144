"""Which checkpoint a path means."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import CheckpointError
from pipeline.run_folder.checkpoint_names import checkpoint_at


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (10, 20):
        (tmp_path / "run" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000010\n")
    return tmp_path / "run"


def test_a_run_its_checkpoints_and_latest_mean_the_newest_complete_one(run):
    for path in (run, run / "checkpoints", run / "checkpoints" / "latest"):
        assert checkpoint_at(path) == run / "checkpoints" / "step_00000010"
    assert checkpoint_at(run / "checkpoints" / "step_00000020") == run / "checkpoints" / "step_00000020"
    assert checkpoint_at(run / "none") == run / "none"  # whoever reads it says that it does not exist


def test_a_run_without_a_newest_one_lists_those_that_it_has(run):
    (run / "checkpoints" / "latest").unlink()
    for path in (run, run / "checkpoints" / "latest"):
        with pytest.raises(CheckpointError, match="latest: no such file, or empty; name a checkpoint: step_00000010,"):
            checkpoint_at(path)
