"""Files of tensors: no code in them runs, and a full disk is reported."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.torch_files import open_torch_file, write_torch_file
from pipeline.errors import CheckpointError


def test_what_is_written_is_read(tmp_path):
    write_torch_file(tmp_path / "file.pt", {"weights": torch.arange(5), "step": 3})
    value = open_torch_file(tmp_path / "file.pt")
    assert value["step"] == 3
    assert torch.equal(value["weights"], torch.arange(5))


class _Planted:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_code_in_a_file_does_not_run(tmp_path):
    torch.save({"weights": torch.zeros(1), "more": _Planted(tmp_path / "ran")}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="nothing in it was run"):
        open_torch_file(tmp_path / "file.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "the planted code would have run"


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", None])
def test_a_damaged_or_missing_file_is_named(tmp_path, content):
    path = tmp_path / "file.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path)) as error:
        open_torch_file(path)
    assert "\n" not in str(error.value)


def test_a_full_disk_is_an_oserror_that_names_the_file():
    with pytest.raises(OSError, match="No space left") as error:
        write_torch_file(Path("/dev/full"), {"weights": torch.zeros(1_000_000)})
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == "/dev/full"
