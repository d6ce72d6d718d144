"""Corpora that other programs tokenized: Megatron-LM's `.bin` and `.idx`, which get a manifest of ours.

Their bytes stay what they are: the corpus holds hard links to them, or copies on another disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline import log
from pipeline.data.file_content import content_of
from pipeline.data.jobs import UnitPart
from pipeline.data.token_shards import Shard, shard_files
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import published_file
from pipeline.log import progress_bar

BACKEND = "imported"
_TOKENS_PER_TASK = 2**22
_logger = log.get_logger(__name__)


class _Stretch(NamedTuple):
    """The documents [first, last) of the shard `prefix`."""

    prefix: Path
    tokenizer: Path
    first: int
    last: int


class _Found(NamedTuple):
    characters: int
    bytes: int
    without_end: int
    tokens: int


def import_shards(folder: Path, files: Sequence[Path], tokenizer: Path, workers: Workers) -> dict[str, UnitPart]:
    """Puts the shards whose `.bin` are `files` into `folder`; returns their names and what they hold.

    Characters and bytes are those of the decoded documents.

    Raises:
        DataError: an index is damaged, or an id is not the tokenizer's.
    """
    parts: dict[str, UnitPart] = {}
    without_end = 0
    for number, file in enumerate(files):
        shard = Shard(file.with_suffix(""))
        stretches = list(_stretches(shard, tokenizer))
        with progress_bar(f"checking {file}", shard.tokens, " tokens") as bar:
            found = []
            for own in workers.run(_measured, stretches):
                found.append(own)
                bar.update(own.tokens)
        name = f"{number:05d}-000000"
        for source, target in zip(shard_files(shard.prefix), shard_files(folder / name), strict=True):
            _put(source, target)
        without_end += sum(own.without_end for own in found)
        parts[name] = UnitPart(
            documents=shard.documents,
            tokens=shard.tokens,
            characters=sum(own.characters for own in found),
            bytes=sum(own.bytes for own in found),
            files={end: content_of(Path(f"{folder / name}{end}")) for end in (".bin", ".idx")},
        )
    if without_end:
        _logger.warning(
            "%s: %d of %d documents do not end with the tokenizer's end of a document (Megatron's --append-eod); the "
            "model will not learn to end one",
            folder,
            without_end,
            sum(part.documents for part in parts.values()),
        )
    return parts


def _stretches(shard: Shard, tokenizer: Path) -> Iterator[_Stretch]:
    first = 0
    while first < shard.documents:
        last = first + 1
        begin = shard.document_start(first)
        if begin + _TOKENS_PER_TASK < shard.tokens:
            last = max(last, shard.document_at(begin + _TOKENS_PER_TASK))
        else:
            last = shard.documents
        yield _Stretch(shard.prefix, tokenizer, first, last)
        first = last


def _measured(stretch: _Stretch) -> _Found:
    """Checks the ids of some documents, and measures their text. Raises DataError for an id that no token has."""
    tokenizer, shard = load_tokenizer(stretch.tokenizer), Shard(stretch.prefix, check=False)
    start, end = list(tokenizer.document_start), list(tokenizer.document_end)
    characters = size = without_end = tokens = 0
    for document in range(stretch.first, stretch.last):
        ids = shard.document(document)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            raise DataError(
                f"{shard.bin_path}: document {document}: expected ids from 0 to {tokenizer.vocab_size - 1} of "
                f"{tokenizer.path}, found {int(ids.min())} to {int(ids.max())}; name the tokenizer that made it"
            )
        body = ids.tolist()
        if start and body[: len(start)] == start:
            body = body[len(start) :]
        ends = body[-len(end) :] == end
        without_end += not ends
        text = tokenizer.decode(body[: -len(end)] if ends else body)
        characters += len(text)
        size += len(text.encode(errors="replace"))
        tokens += len(ids)
    return _Found(characters, size, without_end, tokens)


def _put(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        with source.open("rb") as file, published_file(target) as copy:
            shutil.copyfileobj(file, copy)
