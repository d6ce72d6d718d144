"""A job does not go on over an input that changed, whatever its size: it names the file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.data.corpus.manifest import MANIFEST
from pipeline.data.sources.file_state import check_unchanged, state_of
from pipeline.data.sources.object_stores import RemoteFile
from pipeline.data.tokenize import job as preprocessing
from pipeline.errors import DataError
from tests.data.helpers import contents, documents, tokenize, write_jsonl
from tests.data.range_server import serving

CHANGED = "changed during the work: expected the content that the job began with"


def rewrite(path: Path) -> None:
    """Other content of equal size, at the same time of modification."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    at = content.index(b"Tom")
    content[at : at + 3] = b"Tim"
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace(path: Path) -> None:
    """Another file of equal size and times in its place."""
    copy = path.with_suffix(".copy")
    shutil.copy2(path, copy)
    rewrite(copy)
    copy.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {"rewritten": rewrite, "replaced": replace}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_of_equal_size_and_time_is_seen_to_have_changed(tmp_path: Path, change: str):
    path = write_jsonl(tmp_path / "x.jsonl", documents(50))
    state = state_of(path)
    size = path.stat().st_size
    check_unchanged(path, state)
    CHANGES[change](path)
    assert path.stat().st_size == size
    with pytest.raises(DataError, match=f"{path}: {CHANGED}"):
        check_unchanged(path, state)


def test_a_file_that_is_gone_is_named(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", documents(5))
    state = state_of(path)
    path.unlink()
    with pytest.raises(DataError, match=f"{path}: vanished during the work"):
        check_unchanged(path, state)


def test_the_same_content_in_another_file_is_no_change(tmp_path: Path):
    """As after a copy back from a backup, or other permissions."""
    path = write_jsonl(tmp_path / "x.jsonl", documents(50))
    state = state_of(path)
    shutil.copy(path, tmp_path / "copy")
    os.utime(tmp_path / "copy", ns=(0, 0))
    (tmp_path / "copy").replace(path)
    assert state_of(path).identity != state.identity
    check_unchanged(path, state)


def test_the_index_of_tokens_belongs_to_them(tmp_path: Path):
    for end in (".bin", ".idx"):
        shutil.copy(f"tests/data/fixtures/megatron_uint16{end}", tmp_path / f"x{end}")
    state = state_of(tmp_path / "x.bin")
    check_unchanged(tmp_path / "x.bin", state)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[-1] ^= 1
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(DataError, match=r"x\.bin: changed"):
        check_unchanged(tmp_path / "x.bin", state)


def overwrite(url: str) -> None:
    system = fsspec.filesystem("memory")
    content = system.cat(url).replace(b"Tom", b"Tim")
    system.pipe(url, content)


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("moment", ["before a unit", "within a unit", "after the last unit"])
def test_a_job_whose_input_changes_meanwhile_ends_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, is_remote: bool
):
    path = write_jsonl(tmp_path / "x.jsonl", documents(100))
    url = "memory:///changing/x.jsonl"
    fsspec.filesystem("memory").pipe(url, path.read_bytes())
    source = url if is_remote else str(path)

    def change() -> None:
        if is_remote:
            overwrite(url)
        else:
            rewrite(path)

    units = 0
    tokenize_unit = preprocessing.tokenize_unit

    def tokenized(*arguments: Any) -> object:
        nonlocal units
        units += 1
        if units == 3 and moment == "before a unit":
            change()
        found = tokenize_unit(*arguments)
        if units == 3 and moment == "within a unit":
            change()
        return found

    compare = preprocessing.compare_documents
    check_all = preprocessing.check_all_unchanged
    checks = 0

    def checked(states: Any) -> None:
        nonlocal checks
        checks += 1
        if checks == 2 and moment == "after the last unit":
            change()
        check_all(states)

    monkeypatch.setattr(preprocessing, "tokenize_unit", tokenized)
    monkeypatch.setattr(preprocessing, "check_all_unchanged", checked)
    monkeypatch.setattr(preprocessing, "compare_documents", compare)
    with pytest.raises(DataError, match=rf"x\.jsonl: {CHANGED}"):
        tokenize(tmp_path / "out", source, unit_bytes=1000)
    assert units > 2 and not (tmp_path / "out" / MANIFEST).exists()
    # It does not go on either.
    with pytest.raises(DataError, match=rf"x\.jsonl: {CHANGED}"):
        tokenize(tmp_path / "out", source, unit_bytes=1000)
    shutil.rmtree(tmp_path / "out")
    monkeypatch.undo()
    assert tokenize(tmp_path / "out", source, unit_bytes=1000).documents == 100


def test_a_job_that_continues_sees_a_change_before_any_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_jsonl(tmp_path / "x.jsonl", documents(100))
    with monkeypatch.context() as patch:

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(preprocessing, "compare_documents", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenize(tmp_path / "out", path, unit_bytes=1000)
    before = contents(tmp_path / "out")
    rewrite(path)
    with pytest.raises(DataError, match=rf"x\.jsonl: {CHANGED}"):
        tokenize(tmp_path / "out", path, unit_bytes=1000)
    shards = {name: hash_ for name, hash_ in before.items() if name.endswith(".bin")}
    assert shards and shards.items() <= contents(tmp_path / "out").items()


def test_a_server_is_asked_again(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", documents(50))
    with serving(tmp_path) as server:
        file = RemoteFile(f"{server.url}/x.jsonl")
        state = state_of(file)
        check_unchanged(file, state)
        rewrite(path)
        # The change is in a sampled block, as all of a small file is.
        with pytest.raises(DataError, match=rf"x\.jsonl: {CHANGED}"):
            check_unchanged(file, state)
