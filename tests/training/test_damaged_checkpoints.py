"""When the newest checkpoint is damaged, a run resumes from the one before it and ends with the same figures."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, metrics, prepared, start_deepspeed, train, write_config

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


def _change_manifest(checkpoint: Path, **changes: Any) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, **changes}))


Change = Callable[[Path], object]
# What is done to the newest checkpoint, and how the run reports it.
DAMAGE: dict[str, tuple[Change, str]] = {
    "a bit flipped": (lambda folder: _flip(_rank_file(folder)), "its content changed since it was written"),
    "cut short": (lambda folder: _cut(_rank_file(folder)), "missing or cut short"),
    "a rank's file missing": (lambda folder: _rank_file(folder).unlink(), "missing or cut short"),
    "manifest cut short": (lambda folder: _cut(folder / "manifest.json"), "not a checkpoint's manifest"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "no such file"),
}
ELSEWHERE: dict[str, tuple[Change, str]] = {
    "latest empty": (lambda folder: (folder.parent / "latest").write_text(""), "latest names no checkpoint; trying"),
    "latest missing": (lambda folder: (folder.parent / "latest").unlink(), "latest names no checkpoint; trying"),
}
REFUSED: dict[str, tuple[Change, str]] = {
    "format": (
        lambda folder: _change_manifest(folder, format="scale-cpt checkpoint 9"),
        "not a checkpoint's manifest: format",
    ),
    "files": (
        lambda folder: _change_manifest(folder, files={"../out": {"bytes": 1, "sha256": "0"}}),
        "names files outside its folder",
    ),
    "other data": (lambda _: None, "another data"),
}
TRAINED: dict[str, tuple[Change, str]] = {
    "trained": (lambda folder: _flip(_rank_file(folder)), ""),
    "all lost": (
        lambda folder: [_cut(_rank_file(checkpoint)) for checkpoint in folder.parent.glob("step_*")],
        "checkpoints: no checkpoint is whole; the damaged ones",
    ),
}


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory) -> Path:
    """The folder of a run with checkpoints after steps 2 and 4, the last."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_ranks(train, 2, make_run(folder, tokens, zero=1, **SETTINGS)) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def copies(tokens, finished, tmp_path_factory) -> Path:
    """Runs like `finished` that were killed before they wrote their summary, each then damaged."""
    folder = tmp_path_factory.mktemp("copies")
    for name, (change, _) in (DAMAGE | ELSEWHERE | REFUSED | TRAINED).items():
        shutil.copytree(finished, folder / name)
        (folder / name / "training.json").unlink()
        other = {"data__replay_fraction": 0.5} if name == "other data" else {}
        write_config(folder / name, tokens, zero=1, **SETTINGS, **other)
        change(folder / name / "checkpoints" / NEWEST)
    return folder


@pytest.fixture(scope="module")
def resumed(copies) -> dict[str, tuple[Any, Any]]:
    """The result of each of the two ranks for each copy, resumed or trained; "all lost" is trained twice."""
    jobs = {name: partial(_resume, copies / name / "run.yaml") for name in (*DAMAGE, *ELSEWHERE)}
    jobs |= {name: partial(train, copies / name / "run.yaml") for name in (*REFUSED, *TRAINED)}
    jobs["all lost, again"] = jobs["all lost"]
    return dict(zip(jobs, zip(*run_ranks(in_turn, 2, list(jobs.values())), strict=True), strict=True))


def _resume(config: Path) -> tuple[int, list[str]]:
    """The step that the run resumes from, and this rank's warnings."""
    start_deepspeed()
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("pipeline.training.checkpointing")
    logger.addHandler(handler)
    trainer, position, _ = prepared(config)
    trainer.observers.on_end(finished=True)
    logger.removeHandler(handler)
    return position.step, said


@pytest.mark.parametrize("name", [*DAMAGE, *ELSEWHERE])
def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_used(copies, resumed, name):
    (step, [said]), other = resumed[name]
    checkpoints = copies / name / "checkpoints"
    assert other == (step, []) and (DAMAGE | ELSEWHERE)[name][1] in said
    if name in DAMAGE:
        assert said.endswith("renamed to step_00000004.damaged, trying the one before")
        assert (checkpoints / f"{NEWEST}.damaged").is_dir()
    assert (checkpoints / NEWEST).exists() == (name in ELSEWHERE)
    assert step == (2 if name in DAMAGE else 4)
    assert (checkpoints / "latest").read_text().strip() == f"step_{step:08d}"
    assert not list(checkpoints.glob(".*"))


def test_the_resumed_run_has_the_same_figures(finished, copies, resumed):
    assert resumed["trained"] == (0, 0)
    assert metrics(copies / "trained") == metrics(finished)
    names = sorted(path.name for path in (copies / "trained" / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002", NEWEST, f"{NEWEST}.damaged"]


@pytest.mark.parametrize("name", [*REFUSED, "all lost", "all lost, again"])
def test_what_is_no_damage_and_a_run_without_a_whole_checkpoint_are_refused(copies, resumed, name):
    first, second = resumed[name]
    assert first.startswith("CheckpointError: ") and second == "exit 1"
    assert (REFUSED | TRAINED)[name.removesuffix(", again")][1] in first
    manifest = copies / name / "checkpoints" / NEWEST / "manifest.json"
    assert name not in REFUSED or manifest.exists(), "it was renamed"
