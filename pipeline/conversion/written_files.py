"""The files of an export as they were written, and whether they still are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.files.hashes import file_hash
from pipeline.files.threads import in_threads


def describe_files(folder: Path, *, leaving_out: str) -> dict[str, dict[str, Any]]:
    """The size and SHA-256 of each file in `folder`, by its path there, but for one of them."""
    paths: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / leaving_out:
            paths.append(path)
    files: dict[str, dict[str, Any]] = {}
    for path, sha256 in zip(paths, in_threads(file_hash, paths), strict=True):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256}
    return files


def changed_file(folder: Path, recorded: object) -> str | None:
    """What is not as `describe_files` recorded it, as a clause; None: nothing.

    Files that were added to the folder are left alone.
    """
    if not isinstance(recorded, dict):
        return f"{folder}: nothing says which files were written"
    # The sizes first: they find a file that is gone, or cut short, without reading any.
    for name, file in recorded.items():
        path = folder / name
        if not path.is_file():
            return f"{path}: missing"
        if path.stat().st_size != file["bytes"]:
            return f"{path}: of another size than was written"
    paths = [folder / name for name in recorded]
    for path, found in zip(paths, in_threads(file_hash, paths), strict=True):
        if found != recorded[path.relative_to(folder).as_posix()]["sha256"]:
            return f"{path}: changed after it was written (another SHA-256)"
    return None
