"""Folders in memory: a job flushes every small file that it writes, which takes 10 ms each on a
disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@contextmanager
def _folder() -> Iterator[Path]:
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * 2**30
    with tempfile.TemporaryDirectory(
        prefix="scale-cpt-", dir=_MEMORY if in_memory else None
    ) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of the test's own."""
    with _folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    """A folder for what the tests of a module share."""
    with _folder() as folder:
        yield folder
