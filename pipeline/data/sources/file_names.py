"""What names and patterns of inputs lead to: files, and folders that `datasets` saved."""

from __future__ import annotations

import glob
import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.errors import DataError
from pipeline.files.json_files import read_object

# `save_to_disk` of the library `datasets` writes these beside the files of a dataset, and beside
# the folders of its splits.
_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def matching(name: str) -> list[Path]:
    """The files that a name or a pattern leads to, sorted; folders only where the name is one.

    Raises:
        DataError: there is none.
    """
    if Path(name).exists():
        return [Path(name)]
    # Path.glob takes no absolute pattern.
    found = sorted(glob.glob(escaped(name), recursive=True))  # noqa: PTH207
    if found:
        return [Path(path) for path in found]
    for form in ("NFD", "NFC"):
        spelled = unicodedata.normalize(form, name)
        if Path(spelled).exists() or glob.glob(escaped(spelled), recursive=True):  # noqa: PTH207
            raise DataError(
                f"{name}: no such file; one of the same letters is spelled in Unicode's {form} "
                "(macOS writes NFD): give its name so, a pattern such as '*.jsonl', or rename it"
            )
    raise DataError(
        f"{name}: no such file, and no file matches it as a pattern; give files, or a "
        "quoted pattern"
    )


def escaped(pattern: str) -> str:
    """A pattern in which the folders that exist stand for themselves, also one named `[raw]`."""
    parts = Path(pattern).parts
    existing = Path()
    for number, part in enumerate(parts[:-1]):
        if not (existing / part).is_dir():
            if number == 0:
                return pattern
            return str(Path(glob.escape(str(existing)), *parts[number:]))
        existing /= part
    return str(Path(glob.escape(str(existing)), *parts[-1:]))


def saved_dataset(folder: Path) -> list[Path] | None:
    """The files of a folder that `datasets` saved, in their order; None where it is another folder.

    Raises:
        DataError: it holds several splits, or rows that were only selected.
    """
    if (folder / _SPLITS).exists():
        names = read_object(folder / _SPLITS, DataError).get("splits", [])
        splits = [folder / str(name) for name in names]
        if len(splits) == 1:
            return saved_dataset(splits[0])
        listed = ", ".join(map(str, splits))
        raise DataError(f"{folder}: holds a dataset of several splits; name one of them: {listed}")
    try:
        state = read_object(folder / _STATE, DataError)
    except FileNotFoundError:
        return None
    files = state.get("_data_files")
    if not isinstance(files, list):
        return None
    for file in files:
        if not isinstance(file, dict) or "filename" not in file:
            return None
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: its rows were selected without being copied; save it after "
            "flatten_indices()"
        )
    return [folder / str(file["filename"]) for file in files]


def check_spelling(path: Path) -> None:
    """Refuses a name that is not UTF-8: neither a record of JSON nor a message can hold it.

    Raises:
        DataError: the name is not UTF-8.
    """
    stored = os.fsencode(path)
    try:
        stored.decode()
    except UnicodeDecodeError:
        shown = stored.decode(errors="backslashreplace")
        raise DataError(
            f"{shown}: its name is not UTF-8; rename it, for instance by convmv"
        ) from None


def check_named_once(files: Iterable[Path]) -> None:
    """Refuses files that are named twice, by the same or another spelling, or by a link.

    Raises:
        DataError: a file is named twice.
    """
    names: dict[tuple[int, int], Path] = {}
    for file in files:
        status = file.stat()
        # Device and inode are the same for every name of a file, hard links included.
        other = names.setdefault((status.st_dev, status.st_ino), file)
        if other is not file:
            also = "" if other == file else f", also as {other}, which is the same file"
            raise DataError(f"{file}: is named twice among the inputs{also}; leave one out")


def shown_size(sizes: Sequence[int]) -> str:
    """How many files there are and how large they are together, for the log."""
    size = float(sum(sizes))
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size /= 1024
        unit = larger
    files = "1 file" if len(sizes) == 1 else f"{len(sizes):,} files"
    return f"{files}, {size:.3g} {unit}"
