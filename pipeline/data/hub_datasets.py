"""Datasets named on the Hugging Face hub: `hf://org/name[/config][@revision][/split][?documents=N]`.

One is streamed once, into shards of JSONL in HF_HOME, and read from there later: its revision stays the commit of
that day. After a kill the next call continues behind the last whole shard. Only text is kept: strings, and lists and
objects of strings, such as the messages of a chat.

Nothing of a dataset is run: `datasets` 4 and later have no scripts, and only readers of plain formats are accepted.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from pipeline import log
from pipeline.errors import DataError, faults_of_library
from pipeline.files import json_hash, published_file, read_record, write_record
from pipeline.hub import ADVICE
from pipeline.log import progress_bar

PREFIX = "hf://"
SOURCE = "source.json"
SHARD_BYTES = 256 * 2**20
_NAME = re.compile(
    r"hf://(?P<repo>\w[\w.-]*/\w[\w.-]*)(/(?P<config>\w[\w.-]*))?(@(?P<revision>\w[\w.-]*))?(/(?P<split>\w[\w.-]*))?"
    r"(\?documents=(?P<documents>[1-9]\d*))?"
)
_FORMATS = ("json", "parquet", "csv", "text", "arrow")
_logger = log.get_logger(__name__)


class Source(BaseModel):
    """What a folder of shards holds, and where streaming continues: `state` is that of `datasets`, None at the end.

    `revision` is the commit; None of a dataset that is a folder on this machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    revision: str | None
    documents: NonNegativeInt = 0
    shards: NonNegativeInt = 0
    state: dict[str, Any] | None = None
    finished: bool = False


class _Named(NamedTuple):
    name: str
    repo: str
    config: str | None
    revision: str | None
    split: str
    documents: float

    @property
    def folder(self) -> Path:
        """Where its shards lie. A folder on this machine, which goes before the hub, is another dataset."""
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        local = f"-{json_hash(str(Path(self.repo).resolve()))[:8]}" if Path(self.repo).is_dir() else ""
        return home / "scale-cpt" / (re.sub(r"[/?]", "--", self.name.removeprefix(PREFIX)) + local)

    def shard(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.jsonl.zst"

    def record(self) -> Source | None:
        """What has been streamed; None where nothing has, or a shard was removed."""
        try:
            found = read_record(self.folder / SOURCE, Source, DataError, f"remove {self.folder} to stream it again")
        except FileNotFoundError:
            return None
        return found if all(self.shard(number).exists() for number in range(found.shards)) else None


def streamed_files(name: str) -> list[Path]:
    """The shards of the dataset `name`, which are streamed first where that has not been done.

    Raises:
        DataError: it does not exist, is of a format that is not read, holds no text, or cannot be reached.
    """
    named = _parsed(name)
    record = named.record()
    if record is None or not record.finished:
        from filelock import FileLock  # of huggingface_hub

        named.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(named.folder / ".lock"):  # jobs that share the work start at the same time
            record = _streamed(named, named.record())
    return [named.shard(number) for number in range(record.shards)]


def is_streamed(name: str) -> bool:
    """Whether the dataset `name` is on this machine. Raises DataError where that is no name of one."""
    record = _parsed(name).record()
    return record is not None and record.finished


def _parsed(name: str) -> _Named:
    found = _NAME.fullmatch(name)
    if found is None:
        raise DataError(
            f"{name}: expected hf://org/name[/config][@revision][/split][?documents=N], such as "
            "hf://HuggingFaceFW/fineweb-2/kor_Hang@main/train?documents=100000"
        )
    documents = math.inf if found["documents"] is None else int(found["documents"])
    return _Named(name, found["repo"], found["config"], found["revision"], found["split"] or "train", documents)


def _streamed(named: _Named, record: Source | None) -> Source:
    """Streams the rest of a dataset; a shard and the record of it are published together with where it ended."""
    if record is not None and record.finished:  # by another job
        return record
    with _faults(named):
        if record is None:
            record = Source(name=named.name, revision=_commit(named))
        dataset = _opened(named, record.revision)
        if record.state is not None:
            dataset.load_state_dict(record.state)
    rows = _rows(named, dataset)
    _logger.info("%s: streams it, at commit %s, into %s", named.name, record.revision, named.folder)
    with progress_bar(f"streaming {named.name}", named.documents, " documents", done=record.documents) as bar:
        while not record.finished:
            documents, size, is_last = record.documents, 0, True
            with (
                published_file(named.shard(record.shards)) as file,
                zstandard.ZstdCompressor().stream_writer(file, closefd=False) as text,
            ):
                for row in rows:
                    line = _line(row)
                    text.write(line)
                    size += len(line)
                    documents += 1
                    bar.update(1)
                    is_last = documents >= named.documents
                    if size >= SHARD_BYTES or is_last:
                        break
                    is_last = True  # unless there is another row
            if documents == 0:
                raise DataError(f"{named.name}: holds no documents; name another split")
            state = None if is_last else dataset.state_dict()
            changes = {"documents": documents, "shards": record.shards + 1, "state": state, "finished": is_last}
            record = record.model_copy(update=changes)
            write_record(named.folder / SOURCE, record)
    return record


def _rows(named: _Named, dataset: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401  # an IterableDataset
    with _faults(named):
        yield from dataset


def _faults(named: _Named) -> AbstractContextManager[None]:
    return faults_of_library(f"{named.name}: cannot be streamed ({ADVICE})", DataError)


def _commit(named: _Named) -> str | None:
    """The commit that the revision of a dataset is now; None of a folder on this machine."""
    if Path(named.repo).is_dir():
        return None
    from huggingface_hub import HfApi

    return HfApi().dataset_info(named.repo, revision=named.revision).sha


def _opened(named: _Named, commit: str | None) -> Any:  # noqa: ANN401  # an IterableDataset
    from datasets import load_dataset_builder  # takes seconds to import

    builder = load_dataset_builder(named.repo, named.config, revision=commit)
    kind = type(builder).__module__.rsplit(".", 1)[-1]
    if kind not in _FORMATS:
        raise DataError(f"{named.name}: its files are of format {kind}; expected one of {', '.join(_FORMATS)}")
    dataset = builder.as_streaming_dataset(split=named.split)
    if dataset.features is None:  # they are found while streaming
        return dataset
    texts = [name for name, feature in dataset.features.items() if _is_text(feature)]
    if not texts:
        raise DataError(f"{named.name}: has no column of text among {', '.join(dataset.features)}")
    return dataset.select_columns(texts)


def _is_text(feature: Any) -> bool:  # noqa: ANN401  # a type of `datasets`
    """Whether every leaf of a column's type is a string."""
    if isinstance(feature, (dict, list)):
        return all(map(_is_text, feature.values() if isinstance(feature, dict) else feature))
    inner = getattr(feature, "feature", None)  # of a List
    return _is_text(inner) if inner is not None else getattr(feature, "dtype", None) in ("string", "large_string")


def _line(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, default=str, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # half of a surrogate pair: the reader of records rejects it
        return (json.dumps(row, default=str) + "\n").encode()
