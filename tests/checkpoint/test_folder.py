"""Listing checkpoints, choosing the one to resume from, and removing old ones."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import folder as folders
from pipeline.checkpoint.manifest import CHECKPOINT
from pipeline.errors import CheckpointError
from pipeline.run_folder.checkpoint_names import all_checkpoints, checkpoint_name
from tests.kills import outlives


@pytest.fixture
def folder(tmp_path):
    """Three checkpoints, the second of which `latest` names, and other files that may be there."""
    for name in (
        "step_00000100",
        "step_00000200",
        "step_100000000",
        ".step_00000300.partial",
        "step_00000150.damaged",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "latest").write_text("step_00000200\n")
    return tmp_path


def names(paths):
    return [path.name for path in paths]


def test_candidates_begin_with_the_one_that_latest_names(folder):
    assert names(all_checkpoints(folder)) == [
        "step_00000100",
        "step_00000200",
        checkpoint_name(100_000_000),
    ]
    assert names(folders.candidates(folder)) == ["step_00000200", "step_00000100"]
    (folder / "latest").write_text("step_00000150")  # gone
    assert names(folders.candidates(folder)) == ["step_00000100"]
    for content in ("", "\n", "\0\0\0\0"):  # a torn file
        (folder / "latest").write_text(content)
        assert names(folders.candidates(folder)) == [
            "step_100000000",
            "step_00000200",
            "step_00000100",
        ]
    (folder / "latest").unlink()
    assert names(folders.candidates(folder)) == ["step_100000000", "step_00000200", "step_00000100"]


def test_latest_names_nothing_outside_the_folder(folder):
    too_long = f"step_{'9' * 25}"
    (folder / too_long).mkdir()
    assert len(all_checkpoints(folder)) == 3
    for name in ("../elsewhere", "step_00000200/../..", "/etc", "step_00000150.damaged", too_long):
        (folder / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="write a checkpoint's name into it"):
            folders.candidates(folder)


def test_conversion_takes_only_the_named_checkpoint(folder):
    assert folders.latest_checkpoint(folder) == folder / "step_00000200"
    (folder / "step_00000200" / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"names step_00000200, which is .* not complete; .* name: step_0000010",
    ):
        folders.latest_checkpoint(folder)


@pytest.mark.parametrize("content", [None, "", "\0\0\0\0"])
def test_without_a_name_conversion_takes_the_newest_as_resuming_does(folder, content):
    (folder / "latest").unlink()
    if content is not None:
        (folder / "latest").write_text(content)
    (folder / "step_100000000" / "manifest.json").unlink()  # a copy that is under way
    assert folders.latest_checkpoint(folder) == folder / "step_00000200"
    for name in ("step_00000100", "step_00000200"):
        (folder / name / "manifest.json").unlink()
    assert folders.latest_checkpoint(folder) is None
    with pytest.raises(CheckpointError, match=r"holds no checkpoint yet: train the run first"):
        folders.newest_in(folder)


def test_setting_aside_loses_nothing(folder):
    assert folders.quarantine(folder / "step_00000200").name == "step_00000200.damaged"
    (folder / "step_00000200").mkdir()
    assert folders.quarantine(folder / "step_00000200").name == "step_00000200.damaged.2"
    assert names(folders.candidates(folder)) == ["step_00000100"]


def write_checkpoint(path: Path, attempt: str) -> Path:
    path.mkdir(parents=True)
    for name in ("manifest.json", "weights"):
        (path / name).write_text(json.dumps({"format": CHECKPOINT.format, "attempt": attempt}))
    return path


def complete(paths) -> dict[str, str]:
    """Which attempt wrote each of the complete checkpoints, by name."""
    attempts = {}
    for path in paths:
        manifest = path / "manifest.json"
        if manifest.exists() and (path / "weights").exists():
            attempts[path.name] = json.loads(manifest.read_text())["attempt"]
    return attempts


def test_a_save_over_an_older_checkpoint_killed_at_any_moment_leaves_a_complete_one(tmp_path):
    """And nothing of the older one is removed before `latest` names the new one."""
    for changes in count():
        folder = tmp_path / str(changes)
        folders.set_latest(write_checkpoint(folder / "step_00000100", "first"))
        final = write_checkpoint(folder / "step_00000200", "rolled back")
        partial = write_checkpoint(folders.unfinished(final), "second")
        ended = outlives(changes, folders.publish, partial, final)
        named = folders.latest_checkpoint(folder)
        assert named is not None
        attempts = complete(folder.iterdir())
        is_old_there = "rolled back" in attempts.values()
        assert is_old_there or attempts[named.name] == "second"
        assert set(names(all_checkpoints(folder))) <= attempts.keys()
        folders.remove_unfinished(folder)
        assert set(names(folder.iterdir())) <= {"step_00000100", "step_00000200", "latest"}
        if ended:
            assert attempts == {"step_00000100": "first", "step_00000200": "second"}
            assert named == final
            break


def test_going_back_killed_at_any_moment_makes_later_checkpoints_void_or_changes_nothing(tmp_path):
    before = ["step_00000300", "step_00000200", "step_00000100"]
    for changes in count():
        folder = tmp_path / str(changes)
        checkpoints = [write_checkpoint(folder / name, name) for name in before]
        folders.set_latest(checkpoints[0])
        ended = outlives(changes, folders.rollback_to, checkpoints[-1])
        assert names(folders.candidates(folder)) in (before, before[-1:])
        assert sorted(complete(folder.iterdir()).values()) == sorted(before), "none is removed"
        if ended:
            assert names(all_checkpoints(folder)) == before[-1:]
            break


def test_a_removal_killed_at_any_moment_leaves_no_incomplete_checkpoint(tmp_path):
    for changes in count():
        folder = tmp_path / str(changes)
        doomed = write_checkpoint(folder / "step_00000100", "first")
        ended = outlives(changes, folders.discard, doomed)
        assert set(names(all_checkpoints(folder))) <= complete(folder.iterdir()).keys()
        folders.remove_unfinished(folder)
        assert names(folder.iterdir()) == names(all_checkpoints(folder))
        if ended:
            assert not list(folder.iterdir())
            break


@given(
    steps=st.lists(st.integers(1, 60), min_size=1, unique=True).map(sorted),
    keep_last=st.integers(1, 5),
    keep_every_steps=st.none() | st.integers(1, 20),
)
def test_retention(steps, keep_last, keep_every_steps):
    gone = folders.superseded(steps, keep_last, keep_every_steps)
    stay = [step for step in steps if step not in gone]
    assert set(steps[-keep_last:]) <= set(stay)
    # Of older ones those whose step is a multiple, if such are kept.
    multiples = []
    for step in steps[:-keep_last]:
        if keep_every_steps is not None and step % keep_every_steps == 0:
            multiples.append(step)
    assert stay[:-keep_last] == multiples


@given(
    steps=st.lists(st.integers(1, 60), min_size=1, unique=True).map(sorted),
    keep_last=st.integers(1, 3),
    rollback_steps=st.integers(1, 10),
)
def test_after_every_save_a_checkpoint_lies_before_the_next_spike(steps, keep_last, rollback_steps):
    """If one was ever saved so early."""
    kept: list[int] = []
    for saves, newest in enumerate(steps, 1):
        kept.append(newest)
        kept = [
            step
            for step in kept
            if step not in folders.superseded(kept, keep_last, None, rollback_steps)
        ]
        early = [step for step in steps[:saves] if step <= newest - rollback_steps]
        assert not early or early[-1] in kept
        assert set(steps[:saves][-keep_last:]) <= set(kept)
        assert sum(step <= newest - rollback_steps for step in kept[:-keep_last]) <= 1, (
            "more than is needed"
        )
