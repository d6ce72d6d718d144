"""When the newest checkpoint is damaged, a run resumes from the one before it and ends with the
same figures.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.files import change_json, cut, flip_bit
from tests.training.runs import ended, in_turn, make_run, metrics, prepared, train, write_config

NEWEST = "step_00000004"
SETTINGS: dict[str, Any] = {"zero": 1, "schedule__steps": 4, "checkpoints__every_steps": 2}


def rank_1(checkpoint: Path) -> Path:
    return checkpoint / "rank_00001.safetensors"


def flip(checkpoint: Path) -> None:
    flip_bit(rank_1(checkpoint))


def change_manifest(checkpoint: Path, **changes: Any) -> None:
    change_json(checkpoint / "manifest.json", **changes)


def cut_all(checkpoint: Path) -> None:
    for one in checkpoint.parent.glob("step_*"):
        cut(rank_1(one))


Damage = tuple[Callable[[Path], object], str]
"""What is done to the newest checkpoint, and what the run says."""
DAMAGE: dict[str, Damage] = {
    "a bit flipped": (flip, "missing, or not what was written"),
    "a rank's file missing": (
        lambda folder: rank_1(folder).unlink(),
        "missing, or not what was written",
    ),
    "manifest cut short": (
        lambda folder: cut(folder / "manifest.json"),
        "manifest.json: not JSON",
    ),
    "manifest changed": (
        lambda folder: change_manifest(folder, versions={"torch": "1.0"}),
        "manifest.json: does not match its checksum",
    ),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "no such file"),
}
ELSEWHERE: dict[str, Damage] = {
    "latest empty": (
        lambda folder: (folder.parent / "latest").write_text(""),
        "latest names no checkpoint; trying",
    )
}
REFUSED: dict[str, Damage] = {
    "format": (
        partial(change_manifest, format="scale-cpt checkpoint 1"),
        "not a checkpoint's manifest: format",
    ),
    "files": (
        partial(change_manifest, files={"../out": {"bytes": 1, "sha256": "0"}}),
        "files outside its folder",
    ),
    "other data": (lambda _: None, "another data"),
    "all lost": (cut_all, "checkpoints: no checkpoint is whole; the damaged ones"),
}
CHANGES = DAMAGE | ELSEWHERE | REFUSED | {"trained": (flip, "")}


def resume(config: Path) -> tuple[int, list[str]]:
    """The step that the run resumes from, and this rank's warnings."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("pipeline.training.checkpointing")
    logger.addHandler(handler)
    step = ended(prepared(config)).position.step
    logger.removeHandler(handler)
    return step, said


@pytest.fixture(scope="module")
def folder(tokens, tmp_path_factory) -> Path:
    """A run with checkpoints after steps 2 and 4, the last, and damaged copies of it, without its
    summary.
    """
    folder = tmp_path_factory.mktemp("damaged")
    assert run_ranks(train, 2, make_run(folder / "finished", tokens, **SETTINGS)) == [0, 0]
    for name, (change, _) in CHANGES.items():
        shutil.copytree(folder / "finished", folder / name)
        (folder / name / "training.json").unlink()
        other = {"data__replay_fraction": 0.5} if name == "other data" else {}
        write_config(folder / name, tokens, **SETTINGS, **other)
        change(folder / name / "checkpoints" / NEWEST)
    return folder


@pytest.fixture(scope="module")
def resumed(folder) -> dict[str, tuple[Any, Any]]:
    """The result of each of the two ranks for each copy, resumed or trained; "all lost" is trained
    twice.
    """
    jobs = {name: partial(resume, folder / name / "run.yaml") for name in (*DAMAGE, *ELSEWHERE)}
    jobs |= {name: partial(train, folder / name / "run.yaml") for name in (*REFUSED, "trained")}
    jobs["all lost, again"] = jobs["all lost"]
    return dict(
        zip(jobs, zip(*run_ranks(in_turn, 2, list(jobs.values())), strict=True), strict=True)
    )


@pytest.mark.parametrize("name", [*DAMAGE, *ELSEWHERE])
def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_used(folder, resumed, name):
    (step, [said]), other = resumed[name]
    checkpoints = folder / name / "checkpoints"
    assert other == (step, []) and CHANGES[name][1] in said
    if name in DAMAGE:
        assert said.endswith("renamed to step_00000004.damaged, trying the one before")
        assert (checkpoints / f"{NEWEST}.damaged").is_dir()
    assert (checkpoints / NEWEST).exists() == (name in ELSEWHERE)
    assert step == (2 if name in DAMAGE else 4)
    assert (checkpoints / "latest").read_text().strip() == f"step_{step:08d}"


def test_the_resumed_run_has_the_same_figures(folder, resumed):
    assert resumed["trained"] == (0, 0)
    assert metrics(folder / "trained") == metrics(folder / "finished")
    names = sorted(path.name for path in (folder / "trained" / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002", NEWEST, f"{NEWEST}.damaged"]


@pytest.mark.parametrize("name", [*REFUSED, "all lost, again"])
def test_what_is_no_damage_and_a_run_without_a_whole_checkpoint_are_refused(folder, resumed, name):
    first, second = resumed[name]
    assert first.startswith("CheckpointError: ") and second == "exit 1"
    name = name.removesuffix(", again")
    assert CHANGES[name][1] in first
    assert (
        name == "all lost" or (folder / name / "checkpoints" / NEWEST / "manifest.json").exists()
    ), "it was renamed"
