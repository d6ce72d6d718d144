"""Files of strangers: only regular ones of bounded size, decoded and validated, and every fault is one typed line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from pipeline.errors import DataError
from pipeline.untrusted_files import open_regular, read_bytes, read_json, read_object, read_record, read_text


class _Pair(BaseModel):
    model_config = ConfigDict(extra="forbid")

    left: int
    right: list[int] = []


READERS: list[Callable[..., Any]] = [
    open_regular,
    read_bytes,
    read_text,
    read_json,
    read_object,
    lambda path, error, advice: read_record(path, _Pair, error, advice),
]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("make", "found"), [(Path.mkdir, "a folder"), (_fifo, "a FIFO"), (_device, "a device"), (_loop, "symbolic links")]
)
def test_only_regular_files_are_opened(
    tmp_path: Path, reader: Callable[..., Any], make: Callable[[Path], None], found: str
) -> None:
    make(path := tmp_path / "file")
    with pytest.raises(DataError, match=rf"{path}: .*{found}.*; take another"):
        reader(path, DataError, "take another")


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_file_is_left_to_the_caller(tmp_path: Path, reader: Callable[..., Any]) -> None:
    with pytest.raises(FileNotFoundError):
        reader(tmp_path / "none", DataError, "take another")


def test_a_file_below_a_file_is_a_typed_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="Not a directory"):
        read_bytes(tmp_path / "file" / "below", DataError)


def test_the_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_bytes(path, DataError, limit=4) == b"1234"
    with pytest.raises(DataError, match="expected at most 3 bytes"):
        read_bytes(path, DataError, limit=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON|Invalid JSON"),
        (b'{"left": 1', "not JSON|Invalid JSON"),
        (b"\xff\xfe", "not JSON|Invalid JSON"),
        (b"[" * 100_000, "not JSON|Invalid JSON"),
        (b"[1]", "found list|Input should be an object"),
    ],
)
def test_other_content_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (path := tmp_path / "file").write_bytes(content)
    for read in (read_object, READERS[-1]):
        with pytest.raises(DataError, match=message) as caught:
            read(path, DataError, "take another")
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


def test_a_record_is_validated_by_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"left": 1, "right": [2]}')
    assert read_record(path, _Pair, DataError) == _Pair(left=1, right=[2])
    path.write_bytes(b'{"left": 1, "right": [2, "x"]}')
    with pytest.raises(DataError, match=r"right\.1: Input should be a valid integer"):
        read_record(path, _Pair, DataError)
    path.write_bytes(b'{"left": 1, "middle": 2}')
    with pytest.raises(DataError, match="middle: Extra inputs are not permitted"):
        read_record(path, _Pair, DataError)


def test_text_must_be_utf8(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"not UTF-8 .* at byte 2"):
        read_text(path, DataError)
