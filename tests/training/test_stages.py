"""A run in stages: its borders, what rests, and that it resumes to the bit anywhere."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, metrics, train

# The output rows train, rest, and train again; all else begins in the last stage.
STAGES = [
    {"name": "rows", "steps": 2, "trains": ["output"], "decay": "cosine", "replay_fraction": 0.0},
    {
        "name": "maps",
        "steps": 2,
        "trains": ["expansion_to_base", "norm"],
        "sequence_length": 16,
        "global_batch_size": 4,
        "learning_rate": 1e-3,
    },
    {"name": "all", "steps": 3, "weights": {"english": 2.0}, "passage_steps": 2},
]
STEPS = 7
SETTINGS: dict[str, Any] = {
    "stages": STAGES,
    "schedule__steps": STEPS,
    "checkpoints": {"every_steps": 1, "keep_last": STEPS},
}


def cut_back(run: Path, to: Path, step: int) -> None:
    """A copy of a finished run, as it was when `step` steps were saved."""
    shutil.copytree(run, to)
    checkpoints = to / "checkpoints"
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(checkpoints / f"step_{later:08d}")
    (checkpoints / "latest").write_text(f"step_{step:08d}\n")
    (to / "training.json").unlink()


def rank_files(run: Path, step: int = STEPS) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"step_{step:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("rank_*")}


@pytest.mark.parametrize(
    ("ranks", "zero", "optimizer"),
    [(1, 1, "adamw"), (2, 2, "muon"), (2, 3, "adamw")],
)
def test_a_run_in_stages_resumes_to_the_bit_at_every_step(tokens, tmp_path, ranks, zero, optimizer):
    settings = {**SETTINGS, "zero": zero, "schedule__optimizer": optimizer}
    config = make_run(tmp_path / "run", tokens, **settings)
    assert run_ranks(train, ranks, config) == [0] * ranks
    unbroken = rank_files(tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert [line["stage"] for line in lines[1:]] == [1, 1, 2, 2, 3, 3, 3]

    jobs = []
    for step in range(1, STEPS):
        folder = tmp_path / f"from {step}"
        cut_back(tmp_path / "run", folder, step)
        jobs.append(partial(train, config, changes=[f"folder={folder}"]))
    results = run_ranks(in_turn, ranks, jobs)
    assert results == [[0] * len(jobs)] * ranks
    for step in range(1, STEPS):
        assert rank_files(tmp_path / f"from {step}") == unbroken, step
        assert metrics(tmp_path / f"from {step}") == lines, step
