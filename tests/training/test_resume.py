"""A run that is stopped or killed resumes with identical figures, to the last bit."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from pipeline.errors import RESUME_LATER
from pipeline.run_folder import attempts
from pipeline.run_folder.attempts import read_attempts
from tests.distributed import RankError, run_ranks
from tests.training.runs import KILL_POINTS, in_turn, losses, make_run, metrics, train

STEPS = 3
ZERO_STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory) -> dict[str, Path]:
    """Folders of runs: of each ZeRO stage one undisturbed, and one that a signal stopped in its first step.

    The latter have another number of steps in their file, which --set changes.
    """
    folder = tmp_path_factory.mktemp("runs")
    made = {f"{kind} {zero}": folder / f"{kind}{zero}" for zero in ZERO_STAGES for kind in ("undisturbed", "stopped")}
    jobs = []
    for name, path in made.items():
        stop = "stopped" in name
        config = make_run(path, tokens, zero=int(name[-1]), schedule__steps=STEPS + stop)
        jobs.append(partial(train, config, stop=stop, changes=[f"schedule.steps={STEPS}"] if stop else []))
    assert run_ranks(in_turn, 2, jobs) == [[0, RESUME_LATER] * len(ZERO_STAGES)] * 2
    return made


def test_a_signal_saves_and_the_same_command_resumes(runs):
    stopped = [runs[f"stopped {zero}"] for zero in ZERO_STAGES]
    for folder in stopped:
        assert len(losses(folder)) == 1
        assert (folder / "checkpoints" / "latest").read_text().strip() == "step_00000001"
        assert not (folder / "training.json").exists()
    jobs = [partial(train, folder / "run.yaml") for folder in stopped]
    assert run_ranks(in_turn, 2, jobs) == [[0] * len(jobs)] * 2
    for zero in ZERO_STAGES:
        assert metrics(runs[f"stopped {zero}"]) == metrics(runs[f"undisturbed {zero}"])


def test_a_kill_during_a_save_loses_nothing_that_was_saved(tokens, tmp_path, runs):
    checkpoints = {"every_steps": 1, "keep_last": 1}
    configs = [
        make_run(tmp_path / str(number), tokens, zero=1, schedule__steps=STEPS, checkpoints=checkpoints)
        for number in range(len(KILL_POINTS))
    ]
    for point, config in zip(KILL_POINTS, configs, strict=True):
        with pytest.raises(RankError, match="died without a result"):
            run_ranks(partial(train, kill_at=point), 2, config)
        saved = (config.parent / "checkpoints" / "latest").read_text().strip()
        assert saved == ("step_00000002" if point == "before the old one is removed" else "step_00000001"), point
    assert run_ranks(in_turn, 2, [partial(train, config) for config in configs]) == [[0] * len(configs)] * 2
    for point, config in zip(KILL_POINTS, configs, strict=True):
        assert metrics(config.parent) == metrics(runs["undisturbed 1"]), point
        names = sorted(path.name for path in (config.parent / "checkpoints").iterdir())
        assert names == ["latest", f"step_{STEPS:08d}"], f"{point}: stale folders are left"


def test_a_finished_run_is_unchanged_and_may_train_longer(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, schedule__steps=1)
    longer = make_run(tmp_path, tokens, zero=1, name="longer.yaml", schedule__steps=3, upscaled=f"{tmp_path}/upscaled")
    state, attempt = partial(_written, tmp_path), partial(partial, _attempt)
    jobs = [attempt("1", config), state, attempt("2", config), state, attempt("3", longer)]
    [(first, before, again, after, at_last)] = run_ranks(in_turn, 1, jobs)
    assert (first, again, at_last) == (0, 0, 0)
    assert before == after
    summary = json.loads(before[tmp_path / "training.json"][1])
    assert summary["steps"] == 1
    assert summary["step0_max_abs_logit_difference"] == 0.0
    assert summary["optimizer_state_elements"] == 2 * summary["trainable_parameters"]
    ends = [attempt.ended for attempt in read_attempts(tmp_path)]
    assert [end.exit_code for end in ends if end] == [0, 0, 0], "the attempt that found nothing to do is on record"

    assert len(losses(tmp_path)) == 3
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 3


def _attempt(name: str, config: Path) -> int:
    with patch.dict(os.environ, ATTEMPT=f"{name}.0"):
        return train(config)


def _written(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """When each file of a run was last written, except for the record of the attempts, and the summary's content."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != attempts.NAME)
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.name == "training.json" else b"") for path in files
    }
