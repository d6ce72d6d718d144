"""Whatever happened to the newest checkpoint, a run goes on from the one before it, to the same end."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import RankError, run_ranks
from tests.training.runs import make_run, metrics, prepared, start_deepspeed, train, write_config

NEWEST = "step_00000004"
SETTINGS: dict[str, Any] = {"schedule__steps": 4, "checkpoints__every_steps": 2}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _rank_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*optim_states.pt"))


# What is done to the newest checkpoint, and how it is then told.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped": (lambda one: _flip(_rank_file(one)), "its content changed since it was written"),
    "cut short": (lambda one: _cut(_rank_file(one)), "missing or cut short"),
    "a rank's file missing": (lambda one: _rank_file(one).unlink(), "missing or cut short"),
    "manifest cut short": (lambda one: _cut(one / "manifest.json"), "not a checkpoint's manifest"),
    "manifest missing": (lambda one: (one / "manifest.json").unlink(), "no such file"),
    "manifest of zeros": (lambda one: (one / "manifest.json").write_bytes(bytes(4096)), "not a checkpoint's manifest"),
}
ELSEWHERE: dict[str, Callable[[Path], object]] = {
    "latest empty": lambda one: (one.parent / "latest").write_text(""),
    "latest missing": lambda one: (one.parent / "latest").unlink(),
}


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory) -> Path:
    """The folder of a run with checkpoints after steps 2 and 4, the last."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_ranks(train, 2, make_run(folder, tokens, zero=1, **SETTINGS)) == [0, 0]
    return folder


def copy_of(finished: Path, folder: Path, tokens: Path, **changes: Any) -> Path:
    """The configuration of a run like `finished` that stopped before it said so."""
    shutil.copytree(finished, folder)
    (folder / "training.json").unlink()
    return write_config(folder, tokens, zero=1, **{**SETTINGS, **changes})


def test_each_is_set_aside_and_the_one_before_is_taken(tokens, tmp_path, finished):
    configs = {name: copy_of(finished, tmp_path / name, tokens) for name in (*DAMAGE, *ELSEWHERE)}
    for name, config in configs.items():
        checkpoint = config.parent / "checkpoints" / NEWEST
        (ELSEWHERE[name] if name in ELSEWHERE else DAMAGE[name][0])(checkpoint)
    ranks = run_ranks(_resume_each, 2, configs)
    for name, config in configs.items():
        step, said = ranks[0][name]
        checkpoints = config.parent / "checkpoints"
        assert ranks[1][name] == (step, [])
        if name in ELSEWHERE:
            assert (step, len(said)) == (4, 1)
            assert "latest names no checkpoint; step_00000004 is tried" in said[0]
        else:
            assert (step, len(said)) == (2, 1)
            assert DAMAGE[name][1] in said[0]
            assert said[0].endswith("it is set aside as step_00000004.damaged, and the one before is tried")
            assert (checkpoints / f"{NEWEST}.damaged").is_dir()
            assert not (checkpoints / NEWEST).exists()
        assert (checkpoints / "latest").read_text().strip() == f"step_{step:08d}"
        assert not list(checkpoints.glob(".*"))


def _resume_each(configs: dict[str, Path]) -> dict[str, tuple[int, list[str]]]:
    """The step that each run goes on from, and what this rank warned of."""
    start_deepspeed()
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("pipeline.training.checkpointing").addHandler(handler)
    results = {}
    for name, config in configs.items():
        said.clear()
        trainer, position, _ = prepared(config)
        trainer.observers.on_end(finished=True)
        results[name] = position.step, list(said)
    return results


def test_the_run_ends_as_if_nothing_had_happened(tokens, tmp_path, finished):
    config = copy_of(finished, tmp_path / "run", tokens)
    _flip(_rank_file(tmp_path / "run" / "checkpoints" / NEWEST))
    assert run_ranks(train, 2, config) == [0, 0]
    assert metrics(tmp_path / "run") == metrics(finished)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002", NEWEST, f"{NEWEST}.damaged"]


def test_a_run_that_lost_all_of_them_does_not_begin_anew(tokens, tmp_path, finished):
    config = copy_of(finished, tmp_path / "run", tokens)
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step_*"):
        _cut(_rank_file(checkpoint))
    for _ in range(2):  # the second attempt finds none
        with pytest.raises(
            RankError, match=r"CheckpointError: .*checkpoints: no checkpoint is whole; those that are dam"
        ):
            run_ranks(train, 2, config)


def test_what_is_no_damage_stays_an_error(tokens, tmp_path, finished):
    config = copy_of(finished, tmp_path / "run", tokens, data__replay_fraction=0.5)
    with pytest.raises(RankError, match=r"CheckpointError: .*another data"):
        run_ranks(train, 2, config)
    config = write_config(tmp_path / "run", tokens, zero=1, **SETTINGS)
    path = tmp_path / "run" / "checkpoints" / NEWEST / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": "scale-cpt checkpoint 9"}))
    with pytest.raises(RankError, match=r"CheckpointError: .*not a checkpoint's manifest: format"):
        run_ranks(train, 2, config)
    path.write_text(json.dumps({**manifest, "files": {**manifest["files"], "../out": {"bytes": 1, "sha256": "0"}}}))
    with pytest.raises(RankError, match=r"CheckpointError: .*names files outside its folder"):
        run_ranks(train, 2, config)
    assert path.exists(), "it was set aside"
