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


def _remove_new_settings(checkpoint: Path) -> None:
    """Makes the manifest one of a version that did not know rehearsal."""
    run = json.loads((checkpoint / "manifest.json").read_text())["run"]
    for name in ("replay_loss", "rehearsal_fraction", "rehearsal_coefficient"):
        del run["data"][name]
    for corpus in run["data"]["corpora"].values():
        del corpus["sample"]
    _change_manifest(checkpoint, run=run)


# What is done to the newest checkpoint, and how the run reports it.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped": (lambda folder: _flip(_rank_file(folder)), "its content changed since it was written"),
    "cut short": (lambda folder: _cut(_rank_file(folder)), "missing or cut short"),
    "a rank's file missing": (lambda folder: _rank_file(folder).unlink(), "missing or cut short"),
    "manifest cut short": (lambda folder: _cut(folder / "manifest.json"), "not a checkpoint's manifest"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "no such file"),
    "manifest of zeros": (
        lambda folder: (folder / "manifest.json").write_bytes(bytes(4096)),
        "not a checkpoint's manifest",
    ),
}
ELSEWHERE: dict[str, Callable[[Path], object]] = {
    "latest empty": lambda folder: (folder.parent / "latest").write_text(""),
    "latest missing": lambda folder: (folder.parent / "latest").unlink(),
}
EARLIER = "earlier version"
FILES_OUTSIDE = {"../out": {"bytes": 1, "sha256": "0"}}
NO_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "format": (
        lambda folder: _change_manifest(folder, format="scale-cpt checkpoint 9"),
        "not a checkpoint's manifest: format",
    ),
    "files": (lambda folder: _change_manifest(folder, files=FILES_OUTSIDE), "names files outside its folder"),
}


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory) -> Path:
    """The folder of a run with checkpoints after steps 2 and 4, the last."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_ranks(train, 2, make_run(folder, tokens, zero=1, **SETTINGS)) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def copies(tokens, finished, tmp_path_factory) -> dict[str, Path]:
    """Folders of runs like `finished` that were killed before they wrote their summary, each then damaged."""
    folder = tmp_path_factory.mktemp("copies")
    names = [*DAMAGE, *ELSEWHERE, *NO_DAMAGE, "trained", "all lost", "other data", EARLIER]
    runs = {name: folder / name for name in names}
    for name, run in runs.items():
        shutil.copytree(finished, run)
        (run / "training.json").unlink()
        changes = {"data__replay_fraction": 0.5} if name == "other data" else {}
        write_config(run, tokens, zero=1, **SETTINGS, **changes)
        newest = run / "checkpoints" / NEWEST
        if name in DAMAGE or name in NO_DAMAGE:
            (DAMAGE | NO_DAMAGE)[name][0](newest)
        elif name in ELSEWHERE:
            ELSEWHERE[name](newest)
        elif name == EARLIER:
            _remove_new_settings(newest)
    _flip(_rank_file(runs["trained"] / "checkpoints" / NEWEST))
    for checkpoint in (runs["all lost"] / "checkpoints").glob("step_*"):
        _cut(_rank_file(checkpoint))
    return runs


@pytest.fixture(scope="module")
def resumed(copies) -> dict[str, tuple[Any, Any]]:
    """The result of each of the two ranks for each copy, resumed or trained; "all lost" is trained twice."""
    configs = {name: run / "run.yaml" for name, run in copies.items()}
    jobs = {name: partial(_resume, configs[name]) for name in (*DAMAGE, *ELSEWHERE, EARLIER)}
    jobs |= {name: partial(train, configs[name]) for name in ("trained", "all lost", "other data", *NO_DAMAGE)}
    jobs["all lost, again"] = partial(train, configs["all lost"])
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
    (step, said), other = resumed[name]
    checkpoints = copies[name] / "checkpoints"
    assert other == (step, [])
    if name in ELSEWHERE:
        assert (step, len(said)) == (4, 1)
        assert "latest names no checkpoint; trying step_00000004" in said[0]
    else:
        assert (step, len(said)) == (2, 1)
        assert DAMAGE[name][1] in said[0]
        assert said[0].endswith("renamed to step_00000004.damaged, trying the one before")
        assert (checkpoints / f"{NEWEST}.damaged").is_dir()
        assert not (checkpoints / NEWEST).exists()
    assert (checkpoints / "latest").read_text().strip() == f"step_{step:08d}"
    assert not list(checkpoints.glob(".*"))


def test_a_checkpoint_of_a_version_with_fewer_settings_is_used(resumed):
    assert resumed[EARLIER] == ((4, []), (4, []))


def test_the_resumed_run_has_the_same_figures(finished, copies, resumed):
    assert resumed["trained"] == (0, 0)
    assert metrics(copies["trained"]) == metrics(finished)
    names = sorted(path.name for path in (copies["trained"] / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002", NEWEST, f"{NEWEST}.damaged"]


@pytest.mark.parametrize("attempt", ["all lost", "all lost, again"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(resumed, attempt):
    first, second = resumed[attempt]
    assert first.startswith("CheckpointError: ")
    assert "checkpoints: no checkpoint is whole; the damaged ones" in first
    assert second == "exit 1"


def test_a_fault_other_than_damage_is_an_error(copies, resumed):
    expected = {"other data": "another data"} | {name: message for name, (_, message) in NO_DAMAGE.items()}
    for name, message in expected.items():
        first, second = resumed[name]
        assert first.startswith("CheckpointError: ") and message in first
        assert second == "exit 1"
        assert (copies[name] / "checkpoints" / NEWEST / "manifest.json").exists(), "it was renamed"
