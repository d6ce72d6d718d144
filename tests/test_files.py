"""Folders are complete or absent, and names from untrusted files cannot leave their folder."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import UserError
from pipeline.files import file_hash, in_threads, is_plain_name, published_folder
from tests.hostile import replace_by
from tests.kills import outlives

FILES = ("a", "b")


def publish(path: Path, text: str) -> None:
    with published_folder(path) as folder:
        for name in FILES:
            (folder / name).write_text(text)


def texts_of(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in FILES if (folder / name).exists()]


def test_a_kill_at_any_instant_leaves_the_old_folder_or_the_new(tmp_path: Path):
    for changes in count():
        path = tmp_path / str(changes) / "folder"
        publish(path, "old")
        ended = outlives(changes, publish, path, "new")
        if path.exists():
            assert texts_of(path) in (["old", "old"], ["new", "new"])
        else:
            assert ["old", "old"] in [texts_of(aside) for aside in path.parent.iterdir()]
        if ended:
            assert texts_of(path) == ["new", "new"]
            assert list(path.parent.iterdir()) == [path]
            break
        publish(path, "newer")
        assert texts_of(path) == ["newer", "newer"]
        assert list(path.parent.iterdir()) == [path], "a killed one left something"


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "../up", "a/b", "a/..", "a\\b", "a\0b"])
def test_a_name_with_a_path_is_refused(name: str):
    assert not is_plain_name(name)


@given(st.text(alphabet="ab./\\ é", max_size=8))
def test_a_plain_name_stays_in_its_folder(name: str):
    if is_plain_name(name):
        path = Path(os.path.normpath(Path("/folder") / name))
        assert path.parent == Path("/folder") and path.name == name


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "..hidden", "a..b", "모델.bin", "with space"])
def test_ordinary_names_pass(name: str):
    assert is_plain_name(name)


@pytest.mark.parametrize("kind", ["a device", "a FIFO", "a folder"])
def test_only_a_regular_file_has_a_hash(tmp_path: Path, kind: str):
    replace_by(kind, tmp_path / "x")
    with pytest.raises(UserError, match="expected a regular file"):
        file_hash(tmp_path / "x")


def test_in_threads_keeps_the_order_and_stops_at_an_error():
    assert list(in_threads(lambda number: number**2, range(50))) == [number**2 for number in range(50)]
    begun = []

    def fail_at_first(number):
        begun.append(number)
        time.sleep(0.01)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        list(in_threads(fail_at_first, range(1000)))
    assert len(begun) < 1000
