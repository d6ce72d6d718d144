"""The files that inputs name (paths, patterns, saved datasets, URLs), with kinds and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pipeline.data.sources import hub_datasets
from pipeline.data.sources.file_names import (
    check_named_once,
    check_spelling,
    matching,
    saved_dataset,
)
from pipeline.data.sources.object_stores import (
    InputPath,
    RemoteFile,
    input_path,
    is_remote,
    is_url,
    matching_urls,
)
from pipeline.data.sources.streams import COMPRESSIONS
from pipeline.errors import DataError
from pipeline.files.threads import in_threads

Kind = Literal[
    "jsonl", "json_array", "json_objects", "text", "text_cr", "csv", "tsv", "parquet", "arrow",
    "tokens",
]  # fmt: skip
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".txt": "text", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".arrow": "arrow", ".bin": "tokens",
}  # fmt: skip
TABLES = ("parquet", "arrow")
TOKENS = ".bin"
"""Of tokens that Megatron-LM made, with an index beside them."""
BY_LINES = ("jsonl", "text", "text_cr")


def input_files(inputs: Sequence[str]) -> dict[InputPath, int]:
    """The files that `inputs` name, with their sizes in bytes.

    Inputs are files, patterns (`data/*.jsonl.zst`, sorted), folders that `datasets` saved, URLs of
    object stores and their patterns (`s3://bucket/*.parquet`), and datasets on the hub
    (`hf://org/name`), which are downloaded first where they are not here.

    Raises:
        DataError: a file is missing, empty, named twice, or of an unknown format.
    """
    files = named_files(inputs)
    sizes: dict[InputPath, int] = {}
    # In threads, because each size of a remote file is a request.
    for file, size in zip(files, in_threads(_size_of, files), strict=True):
        sizes[file] = size
    for file, size in sizes.items():
        if size == 0:
            raise DataError(f"{file}: is empty; leave it out or put documents in it")
    return sizes


def _size_of(file: InputPath) -> int:
    return int(file.stat().st_size)


def named_files(inputs: Sequence[str]) -> list[InputPath]:
    """The files that `inputs` name, without reading their documents.

    Raises:
        DataError: where a file is missing, a folder, named twice, or not on this machine.
    """
    found: list[Path] = []
    downloaded: list[Path] = []
    remote: list[RemoteFile] = []
    for name in inputs:
        if name.startswith(hub_datasets.PREFIX):
            downloaded += hub_datasets.dataset_files(name)
        elif is_remote(name):
            remote += matching_urls(name)
        else:
            found += _local_files(name)
    for file in [*found, *downloaded]:
        _check_local(file)
    for url in remote:
        if kind_of(url) == "tokens":
            raise DataError(
                f"{url}: tokens of Megatron-LM are read from this machine; download them"
            )
    # Downloaded files are compared by name: files of equal content are one in the hub's cache.
    check_named_once(found)
    for name, times in Counter(map(str, [*downloaded, *remote])).items():
        if times > 1:
            raise DataError(f"{name}: is named twice among the inputs")
    return [*found, *remote, *downloaded]


def _local_files(name: str) -> list[Path]:
    """The files of this machine that a name, a pattern or a URL `file://` leads to."""
    files: list[Path] = []
    if is_url(name):
        name = str(input_path(name))
    for path in matching(name):
        check_spelling(path)
        saved = saved_dataset(path) if path.is_dir() else None
        if saved is None:
            files.append(path)
        else:
            files += saved
    return files


def _check_local(file: Path) -> None:
    """Makes sure that a name leads to a file of a known format.

    Raises:
        DataError: it leads to nothing, to a folder, or to a file of another format.
    """
    if not file.exists():
        raise DataError(f"{file}: no such file, or a link to none; put it back, or leave it out")
    if file.is_dir():
        raise DataError(
            f"{file}: is a folder; name its files by a pattern, such as '{file}/*.jsonl'"
        )
    kind_of(file)


def is_text(inputs: Sequence[str]) -> bool:
    """Whether `inputs` are documents, not the tokens that another program made of them."""
    return not any(name.endswith(TOKENS) for name in inputs)


def is_here(inputs: Sequence[str]) -> bool:
    """Whether all `inputs` are on this machine; False where one is read, or would be downloaded,
    over the network."""
    for name in inputs:
        if is_remote(name):
            return False
        if name.startswith(hub_datasets.PREFIX) and hub_datasets.downloaded_files(name) is None:
            return False
    return True


def kind_of(path: InputPath) -> Kind:
    """The kind of a file by its name.

    Raises:
        DataError: the name says no known format.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if is_compressed:
        suffixes.pop()
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    # Readers of tables and of tokens go to places in the stored file.
    if kind is None or (is_compressed and kind in (*TABLES, "tokens")):
        raise DataError(
            f"{path}: unknown format; expected a name ending in {', '.join(KINDS)}; text formats "
            "may also end in .gz, .zst or .xz"
        )
    return kind
