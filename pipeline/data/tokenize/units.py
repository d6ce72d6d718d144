"""Input files, their split into units of work, and the records in them.

A unit is a range of one file, small enough that little is lost when a worker dies. The units follow
from the files and the unit size alone, never from the workers.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

from pipeline.data.corpus.indexed_dataset import Shard
from pipeline.data.sources import hub_datasets
from pipeline.data.sources.columns import (
    arrow_ranges,
    arrow_records,
    parquet_ranges,
    parquet_records,
)
from pipeline.data.sources.file_names import (
    check_named_once,
    check_spelling,
    matching,
    saved_dataset,
)
from pipeline.data.sources.json_records import begins_array, begins_objects
from pipeline.data.sources.lines import line_end
from pipeline.data.sources.object_stores import (
    InputPath,
    RemoteFile,
    input_path,
    is_remote,
    is_url,
    matching_urls,
)
from pipeline.data.sources.readers import text_records
from pipeline.data.sources.records import Document, Keys, Record, Rejected, composed
from pipeline.data.sources.streams import (
    COMPRESSIONS,
    Stream,
    encoding_advice,
    open_stream,
    text_length,
    text_per_byte,
)
from pipeline.data.tokenize.queue import WorkUnit
from pipeline.errors import DataError
from pipeline.files import in_threads

Kind = Literal[
    "jsonl", "json_array", "json_objects", "text", "text_cr", "csv", "tsv", "parquet", "arrow",
    "tokens",
]  # fmt: skip

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".txt": "text", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".arrow": "arrow", ".bin": "tokens",
}  # fmt: skip
_TABLES = ("parquet", "arrow")
TOKENS = ".bin"
"""Of tokens that Megatron-LM made, with an index beside them."""
_BY_LINES = ("jsonl", "text", "text_cr")
# Kinds that only make sense from their beginning.
_READ_WHOLE = ("json_array", "json_objects", "csv", "tsv")
_FAULTS = {"truncated_file": "is truncated", "corrupt_file": "is damaged"}
_UNITS_PER_CORPUS = 64
_MIN_UNIT_BYTES = 4 * 2**20
_MAX_UNIT_BYTES = 64 * 2**20
# The most files that a sample comes from.
_SAMPLED_FILES = 16
# The fewest bytes that a sample reads at a place.
_SAMPLED_BYTES = 2**16


@dataclass(frozen=True)
class Unit(WorkUnit):
    """A range [start, stop) of a file: bytes of text, row groups or documents. `size` in bytes is
    approximate."""

    kind: Kind
    start: int
    stop: int


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
        if _kind(url) == "tokens":
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
    _kind(file)


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


def default_unit_bytes(total: int) -> int:
    """A unit size for `total` bytes: small inputs go to several workers, large ones are split into
    few shards."""
    return min(max(total // _UNITS_PER_CORPUS, _MIN_UNIT_BYTES), _MAX_UNIT_BYTES)


def split_file(path: InputPath, file_index: int, keys: Keys, unit_bytes: int) -> list[Unit]:
    """The units of one file, in order. A compressed file is read once for its length.

    Raises:
        DataError: a table or an index is damaged, or `keys` ask for what such a file does not have.
    """
    kind = _kind(path)
    _check_keys(path, kind, keys)
    if kind == "tokens":
        ranges = _token_ranges(Path(str(path)), unit_bytes)
    elif kind == "parquet":
        ranges = parquet_ranges(path, keys, unit_bytes)
    elif kind == "arrow":
        ranges = arrow_ranges(path, keys, unit_bytes)
    else:
        length = _checked_length(path, keys)
        kind = _layout(path, kind, keys)
        if kind in _READ_WHOLE or keys.document == "file":
            unit_bytes = max(length, 1)
        ranges = _byte_ranges(length, unit_bytes)
    units: list[Unit] = []
    for number, (start, stop, size) in enumerate(ranges):
        # The name orders the shards, and begins with the number of the file: see contamination.
        name = f"{file_index:05d}-{number:06d}"
        units.append(Unit(name, size, str(path), kind, start, stop))
    return units


def _check_keys(path: InputPath, kind: Kind, keys: Keys) -> None:
    """Compares what is asked for with what a file of this kind can have.

    Raises:
        DataError: the file cannot have it.
    """
    if keys.document != "line" and kind != "text":
        raise DataError(
            f"{path}: document {keys.document} is for .txt files; here each record is a document"
        )
    if keys.chat is not None and kind not in ("jsonl", *_TABLES):
        raise DataError(
            f"{path}: chats are read from JSON or Parquet; write them as JSONL, a chat a line"
        )
    if keys.encoding is not None and kind in (*_TABLES, "tokens"):
        raise DataError(f"{path}: encoding is for text files; Parquet and Arrow are UTF-8")
    if keys.prompt is not None and kind in ("text", "tokens"):
        raise DataError(
            f"{path}: a line has no {keys.prompt!r}; give texts with prompts as JSONL, CSV or "
            "Parquet"
        )


def _checked_length(path: InputPath, keys: Keys) -> int:
    """The bytes of text in a file.

    Raises:
        DataError: the file is damaged, and `keys` do not allow that.
    """
    length, fault = text_length(path, keys.encoding)
    if fault is not None and not keys.allow_damaged:
        raise DataError(
            f"{path}: {_FAULTS[fault]} after {length:,} bytes of text; copy it again, or set "
            "`allow_damaged: true` for the corpus (--allow-damaged) to read what precedes the "
            "damage"
        )
    return length


def _byte_ranges(length: int, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Ranges of `unit_bytes` that cover a text of `length` bytes; an empty text has one, too."""
    ranges: list[tuple[int, int, int]] = []
    for start in range(0, max(length, 1), unit_bytes):
        stop = min(start + unit_bytes, length)
        ranges.append((start, stop, stop - start))
    return ranges


def _layout(path: InputPath, kind: Kind, keys: Keys) -> Kind:
    """The kind of a text file by its content: JSON that is not an object a line, and lines of old
    Macs."""
    if kind == "text":
        return "text_cr" if line_end(open_stream(path, keys.encoding)) == b"\r" else kind
    if kind == "jsonl":
        named_lines = ".json" not in [suffix.lower() for suffix in path.suffixes[-2:]]
        # LLaMA-Factory's data, among others, are one array of all records.
        if begins_array(open_stream(path, keys.encoding), named_lines=named_lines):
            return "json_array"
        if begins_objects(open_stream(path, keys.encoding)):
            return "json_objects"
    return kind


def beginning_of(path: InputPath, keys: Keys, most_bytes: int) -> tuple[Unit, float]:
    """The beginning of a file of text, and about how many bytes of text the whole file has.

    That is about `most_bytes` of lines; tables and arrays have no parts, so the unit is all of
    them. No compressed file is read to its end. Raises as `split_file`.
    """
    kind = _kind(path)
    if kind in _TABLES:
        ranges_of = parquet_ranges if kind == "parquet" else arrow_ranges
        ranges = ranges_of(path, keys, most_bytes)
        if not ranges:
            # A file without rows.
            return Unit("beginning", 0, str(path), kind, 0, 0), 0.0
        start, stop, size = ranges[0]
        whole_size = sum(size_of_range for _, _, size_of_range in ranges)
        return Unit("beginning", size, str(path), kind, start, stop), float(whole_size)
    whole = path.stat().st_size * text_per_byte(path)
    size = min(most_bytes, math.ceil(whole))
    return Unit("beginning", size, str(path), _layout(path, kind, keys), 0, size), whole


def _token_ranges(path: Path, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Ranges of documents in a shard of Megatron-LM, of about `unit_bytes` each."""
    shard = Shard(path.with_suffix(""))
    # A damaged index could lead outside of its file.
    shard.check_index()
    size = shard.dtype.itemsize
    # A document is longer than a unit where several of these tokens are in it.
    firsts = {0}
    for token in range(0, shard.tokens, max(1, unit_bytes // size)):
        firsts.add(shard.document_at(token))
    cuts = [*sorted(firsts), shard.documents]
    ranges: list[tuple[int, int, int]] = []
    for first, following in pairwise(cuts):
        tokens = shard.document_start(following) - shard.document_start(first)
        ranges.append((first, following, size * tokens))
    return ranges


def unit_records(unit: Unit, keys: Keys) -> Iterator[Record]:
    """The records of a unit of text.

    Raises:
        DataError: the unit holds tokens.
    """
    path = input_path(unit.path)
    if unit.kind == "tokens":
        raise DataError(
            f"{path}: holds tokens, expected text; name text, for a held-out part as heldout_input"
        )
    if unit.kind == "parquet":
        records = parquet_records(path, unit.start, unit.stop, keys)
    elif unit.kind == "arrow":
        records = arrow_records(path, unit.start, unit.stop, keys)
    else:
        records = text_records(
            _cached_stream(path, keys.encoding), unit.kind, unit.start, unit.stop, keys
        )
    if keys.normalize == "nfc":
        records = map(composed, records)
    if keys.special_tokens == "control":
        records = map(_with_control, records)
    return records


def _with_control(record: Record) -> Record:
    """The record with the mark that special tokens in its text are these tokens."""
    if isinstance(record, Document):
        return record._replace(has_control=True)
    return record


def good_documents(
    inputs: Sequence[str], keys: Keys, *, max_bytes: int | None = None
) -> Iterator[Document]:
    """Streams the usable documents of the inputs; with `max_bytes`, about equally much of the
    beginning of each file.

    Raises:
        DataError: there is none, or an input cannot be read.
    """
    files = input_files(inputs)
    most = math.inf if max_bytes is None else max_bytes // len(files)
    is_empty = True
    first_bad = ""
    for file, size in files.items():
        taken = 0
        units = split_file(file, 0, keys, default_unit_bytes(size))
        # One chain over the file's units, so that a break ends the file.
        for record in chain.from_iterable(unit_records(unit, keys) for unit in units):
            if isinstance(record, Rejected):
                first_bad = first_bad or f": {record}"
                continue
            is_empty = False
            yield record
            taken += record.utf8_bytes
            if taken >= most:
                break
    if is_empty:
        fault = _no_document(inputs, keys, first_bad)
        raise fault


def texts(
    inputs: Sequence[str],
    *,
    text_key: str = "text",
    max_bytes: int | None = None,
    seed: int | None = None,
) -> Iterator[str]:
    """Streams the texts of the usable documents of the inputs, about `max_bytes` of them.

    That is the beginning of each file, or with `seed` random places in some of the files.
    """
    keys = Keys(text_key)
    documents: Iterable[Document]
    if seed is not None and max_bytes is not None:
        documents, _ = sampled_documents(inputs, keys, max_bytes, seed=seed)
    else:
        documents = good_documents(inputs, keys, max_bytes=max_bytes)
    return (document.text for document in documents)


def sampled_documents(
    inputs: Sequence[str], keys: Keys, max_bytes: int, *, seed: int = 0
) -> tuple[list[Document], float]:
    """Usable documents from random places all over the inputs, and how many times as much the
    inputs hold.

    Raises:
        DataError: there is none, or an input cannot be read.
    """  # noqa: DOC501
    files = input_files(inputs)
    draw = random.Random(seed)
    opened = draw.sample([*files], min(_SAMPLED_FILES, len(files)))
    units: list[Unit] = []
    for number, file in enumerate(opened):
        unit_bytes = max(_SAMPLED_BYTES, files[file] // 1024)
        units += split_file(file, number, keys, unit_bytes)

    documents: list[Document] = []
    first_bad = ""
    read = 0
    for place, size in _sampled_places(units, keys, max_bytes, draw):
        taken = 0
        for record in unit_records(place, keys):
            if isinstance(record, Rejected):
                first_bad = first_bad or f": {record}"
                continue
            documents.append(record)
            taken += record.utf8_bytes
            if taken >= size and place.kind not in _BY_LINES:
                break
        else:
            # All of the place was read, keys and brackets of JSON included.
            taken = place.size
        read += min(taken, place.size)
    if not documents:
        raise _no_document(inputs, keys, first_bad)
    # First from what was read to the files that were opened, then to all files.
    scale_of_opened = max(1.0, sum(unit.size for unit in units) / max(1, read))
    scale = sum(files.values()) / sum(files[file] for file in opened)
    return documents, scale * scale_of_opened


def _sampled_places(
    units: Sequence[Unit], keys: Keys, max_bytes: int, draw: random.Random
) -> list[tuple[Unit, int]]:
    """Randomly drawn units, each with the bytes to read there, `max_bytes` together.

    They come in the order of their files, so that a compressed file is read forwards.
    """
    share = _share_of_each([unit.size for unit in units], max_bytes)
    places: list[tuple[Unit, int]] = []
    wanted = max_bytes
    # Every unit once, in random order.
    for unit in draw.sample(units, len(units)):
        if wanted <= 0:
            break
        size = min(unit.size, share)
        place = unit
        if unit.kind in _BY_LINES and keys.document != "file":
            # A unit of lines can end anywhere, so no more is read than is wanted.
            place = replace(unit, stop=unit.start + size, size=size)
        places.append((place, size))
        wanted -= size
    return sorted(places, key=lambda drawn: (drawn[0].path, drawn[0].start))


def _share_of_each(sizes: Sequence[int], wanted: int) -> int:
    """How much to read of each of several units, of these sizes, so that they give `wanted` bytes
    together."""
    # From the smallest on: what a small unit lacks of its share, the larger ones give.
    left = wanted
    for number, size in enumerate(sorted(sizes)):
        share = -(-left // (len(sizes) - number))  # rounded up
        if size >= share:
            return max(_SAMPLED_BYTES, share)
        left -= size
    return max([_SAMPLED_BYTES, *sizes])


def _no_document(inputs: Sequence[str], keys: Keys, first_bad: str = "") -> DataError:
    advice = encoding_advice(named_files(inputs)) if keys.encoding is None else None
    if advice is None:
        advice = "give records a string under that key, or set text_key, or messages_key for chats"
    return DataError(
        f"{', '.join(inputs)}: no usable document under the text_key {keys.text!r}{first_bad}; "
        f"{advice}"
    )


def _kind(path: InputPath) -> Kind:
    """The kind of a file by its name.

    Raises:
        DataError: the name says no known format.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if is_compressed:
        suffixes.pop()
    kind = _KINDS.get(suffixes[-1]) if suffixes else None
    # Readers of tables and of tokens go to places in the stored file.
    if kind is None or (is_compressed and kind in (*_TABLES, "tokens")):
        raise DataError(
            f"{path}: unknown format; expected a name ending in {', '.join(_KINDS)}; text formats "
            "may also end in .gz, .zst or .xz"
        )
    return kind


@lru_cache(maxsize=1)
def _cached_stream(path: InputPath, encoding: str | None) -> Stream:
    """The stream of the last file: reading the next unit of a compressed file continues where the
    last unit ended."""
    return open_stream(path, encoding)
