"""Datasets named on the Hugging Face hub: `hf://org/name[/config][@revision][/split][?files=N]`.

`datasets` says which files hold a configuration and split, and huggingface_hub downloads them into
its cache, where a download that was killed continues. A record in HF_HOME then names them, so that
later calls need no network, and read the commit of that day. Nothing of a dataset is run: its files
are read like any others.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from pipeline import log
from pipeline.data.sources.file_names import shown_size
from pipeline.errors import DataError, faults_of_library
from pipeline.files.json_files import read_record, write_record
from pipeline.files.threads import in_threads
from pipeline.hub import ADVICE

PREFIX = "hf://"
_NAME = re.compile(
    r"hf://(?P<repo>\w[\w.-]*/\w[\w.-]*)(/(?P<config>\w[\w.-]*))?(@(?P<revision>\w[\w.-]*))?"
    r"(/(?P<split>\w[\w.-]*))?(\?files=(?P<files>[1-9]\d*))?"
)
_logger = log.get_logger(__name__)


class Downloaded(BaseModel):
    """The files of a dataset on this machine, in its own order."""

    files: list[Path]


def dataset_files(name: str) -> list[Path]:
    """The files of the dataset `name`, which are downloaded first where that has not been done.

    Raises:
        DataError: it does not exist, or cannot be reached.
    """
    found = downloaded_files(name)
    if found is not None:
        return found
    from datasets import load_dataset_builder  # takes seconds to import

    named = _parsed(name)
    with faults_of_library(f"{name}: cannot be downloaded ({ADVICE})", DataError):
        # With the prefix no folder of that name on this machine is taken instead.
        builder = load_dataset_builder(
            f"hf://datasets/{named['repo']}", named["config"], revision=named["revision"]
        )
        splits: dict[str, list[str]] = builder.config.data_files or {}
        split = named["split"] or "train"
        if split not in splits:
            raise DataError(
                f"{name}: has no files of a split {split!r}; it has {', '.join(map(str, splits))}"
            )
        urls = splits[split]
        if named["files"]:
            urls = urls[: int(named["files"])]
        sizes = list(in_threads(_size_of, urls))
        _logger.info("%s: downloads %s", name, shown_size(sizes))
        # The URLs hold the commit, so that all files are of one revision, whatever is pushed
        # meanwhile.
        files = list(in_threads(_local_file, urls))
    _record_of(name).parent.mkdir(parents=True, exist_ok=True)
    write_record(_record_of(name), Downloaded(files=files))
    return files


def _parsed(name: str) -> re.Match[str]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise DataError(
            f"{name}: expected hf://org/name[/config][@revision][/split][?files=N], such as "
            "hf://HuggingFaceFW/fineweb-2/kor_Hang@main/train?files=2"
        )
    return found


def _record_of(name: str) -> Path:
    from huggingface_hub import constants

    file_name = re.sub(r"[/?]", "--", name.removeprefix(PREFIX)) + ".json"
    return Path(constants.HF_HOME, "scale-cpt", file_name)


def downloaded_files(name: str) -> list[Path] | None:
    """The files of the dataset `name` where it was downloaded; None where it was not, or one was
    removed.

    Raises:
        DataError: `name` is no name of a dataset.
    """
    _parsed(name)
    record = _record_of(name)
    try:
        downloaded = read_record(
            record, Downloaded, DataError, f"remove {record} to download it again"
        )
    except FileNotFoundError:
        return None
    # The hub's cache may have been tidied up since.
    for file in downloaded.files:
        if not file.exists():
            return None
    return downloaded.files


def _size_of(url: str) -> int:
    """What the hub says of the size of a file, in bytes."""
    from huggingface_hub import HfFileSystem

    return int(HfFileSystem().info(url)["size"])


def _local_file(url: str) -> Path:
    """Downloads the file at a `hf://datasets/org/name@commit/path`."""
    from huggingface_hub import hf_hub_download

    found = re.fullmatch(r"hf://datasets/([^@]+)@([^/]+)/(.+)", url)
    if found is None:
        raise DataError(f"expected files on the hub alone, found {url}")
    repo, commit, path = found.groups()
    return Path(hf_hub_download(repo, path, repo_type="dataset", revision=commit))
