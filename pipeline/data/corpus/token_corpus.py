"""A token corpus on disk: its manifest, and its tokens as one sequence."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, PositiveInt

from pipeline.data.corpus.indexed_dataset import (
    FileContent,
    Shard,
    ShardFile,
    check_file,
    shard_file,
)
from pipeline.data.sources.records import (
    DocumentUnit,
    HeldoutBy,
    Normalization,
    Quoting,
    SpecialTokens,
)
from pipeline.errors import DataError
from pipeline.files import (
    FolderKind,
    in_threads,
    is_plain_name,
    json_hash,
    read_record,
    write_record,
)
from pipeline.log import progress_bar

MAKERS = "scale-cpt tokenize (or scale-cpt sample, for text that the base writes)"
MANIFEST = "manifest.json"
"""Written last: without it a corpus is unfinished."""
CORPUS = FolderKind("a token corpus", MANIFEST, "scale-cpt token corpus 3")
SAMPLED_BYTES = 2**30
"""How much of the tokens is compared where reading all of them would take too long."""
_MAX_OPEN_SHARDS = 64


class TokenizerRecord(BaseModel):
    """The tokenizer of a corpus. `backend` is the library that encoded: the checked fast encoder or the reference."""

    fingerprint: str
    vocab_size: PositiveInt
    document_start: list[int]
    document_end: list[int] = Field(min_length=1)
    backend: str


class InputFile(NamedTuple):
    """An input file; `sha256` is of its bytes on disk, of a very large file of some of its blocks."""

    path: str
    bytes: int
    sha256: str


def _plain_name(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError(f"names a shard outside the folder: {name!r}")
    return name


class ShardRecord(NamedTuple):
    """A shard: its name, and its files in the manifest's folder by the ends of their names.

    A tuple, as all of which there are many: each rank holds a corpus's 100,000 shards in memory.
    """

    name: Annotated[str, AfterValidator(_plain_name)]
    documents: NonNegativeInt
    tokens: NonNegativeInt
    files: dict[ShardFile, FileContent]


class SamplingRecord(BaseModel):
    """How a base model wrote a corpus. `base` holds the SHA-256 of its weight files, by their names.

    `tokens` were asked for; the others are settings of config.run.Sampling. `batch_size` documents were written at a
    time, which decides how sums are rounded, and so the text.
    """

    base: dict[str, str]
    tokens: int
    temperature: float
    max_tokens: int
    prompt_tokens: int | None
    chat_template: bool
    seed: int
    batch_size: int
    thinking: bool | None = None
    system_prompts: list[str] = []


class Description(BaseModel):
    """What a corpus is made of, but for its inputs. In one that a base model wrote (`sampling`), these are prompts."""

    tokenizer: TokenizerRecord
    text_key: str
    prompt_key: str | None = None
    document: DocumentUnit = "line"
    chat_date: str | None = None
    """what the template that framed chats was told is today, if it asks"""
    chat_template: str | None = None
    """its hash, of that date too"""
    encoding: str | None = None
    quoting: Quoting | None = None
    normalize: Normalization | None = None
    special_tokens: SpecialTokens | None = None
    """what a text that spells a special token became; None: an earlier version made it, which did not say"""
    heldout_fraction: float = 0.0
    heldout_by: HeldoutBy = "text"
    """whose hash decides what is held out; text: an earlier version made it"""
    sampling: SamplingRecord | None = None


class Counts(BaseModel):
    """`characters` and `bytes` (UTF-8) are of the accepted text, prompts included.

    In a corpus with prompts, `prompt_tokens` and `prompt_bytes` are the prompts' share of `tokens` and `bytes`.
    `special_tokens_spelled`: how often a text spells a special token. `unknown_tokens` and `lost_characters` are what
    the tokenizer cannot spell. `decomposed_documents` are not in Unicode's NFC.
    """

    documents: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    characters: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    prompt_tokens: NonNegativeInt = 0
    prompt_bytes: NonNegativeInt = 0
    special_tokens_spelled: NonNegativeInt = 0
    unknown_tokens: NonNegativeInt = 0
    lost_characters: NonNegativeInt = 0
    decomposed_documents: NonNegativeInt = 0

    @property
    def unknown_fraction(self) -> float:
        """The share of the text that the tokenizer cannot spell: of the tokens, or of the characters."""
        of_tokens = self.unknown_tokens / max(self.tokens, 1)
        return max(of_tokens, self.lost_characters / max(self.characters, 1))


class Manifest(Description, Counts):
    """The contents of `manifest.json`. They depend on the job alone, not on time, machine or workers."""

    format: Literal["scale-cpt token corpus 3"] = "scale-cpt token corpus 3"
    part: str
    token_dtype: str
    tokens_per_character: float
    tokens_per_byte: float
    rejected: dict[str, int]
    inputs: list[InputFile]
    shards: list[ShardRecord]

    def save(self, folder: Path) -> None:
        """Publishes the manifest in `folder`, which completes the corpus."""
        write_record(folder / MANIFEST, self)


def load_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the corpus in `folder`. Raises DataError where it is missing or damaged."""
    path = folder / MANIFEST
    try:
        return read_record(path, Manifest, DataError, _advice_for(folder))
    except FileNotFoundError:
        state = (
            f"is unfinished: start {MAKERS} again"
            if folder.is_dir()
            else f"does not exist: start {MAKERS}"
        )
        raise DataError(f"{path}: no such file; the token corpus {folder} {state}") from None


def _advice_for(folder: Path) -> str:
    return f"copy the corpus again, or remove the folder {folder} and start {MAKERS}"


class TokenCorpus:
    """The corpus in `folder`: its shards as one sequence of `tokens` ids, each shard opened when it is needed.

    Raises:
        DataError: it is missing, unfinished, damaged or empty, or its tokenizer is not that of `tokenizer_fingerprint`.
    """

    def __init__(self, folder: Path, *, tokenizer_fingerprint: str | None = None) -> None:
        self.folder = folder
        self.manifest = load_manifest(folder)
        self._advice = _advice_for(folder)
        found = self.manifest.tokenizer.fingerprint
        if tokenizer_fingerprint is not None and found != tokenizer_fingerprint:
            raise DataError(
                f"{folder}: was tokenized with another tokenizer: expected "
                f"{tokenizer_fingerprint[:24]}…, found {found[:24]}…; make it again with the run's tokenizer"
            )
        self.tokens = self.manifest.tokens
        if self.tokens == 0:
            raise DataError(f"{folder}: holds no tokens; give it documents or leave it out")
        self._ends = list(accumulate(shard.tokens for shard in self.manifest.shards))
        self._checked: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_shard"}

    @cached_property
    def content(self) -> str:
        """A hash of what training reads: the tokens and documents of all shards, wherever their text came from.

        The library that encoded is no part of it, nor are the names and the compression of the input files.
        """
        manifest = self.manifest
        shards = [
            [
                shard.documents,
                shard.tokens,
                sorted((end, *content) for end, content in shard.files.items()),
            ]
            for shard in manifest.shards
        ]
        counts = manifest.model_dump(include=set(Counts.model_fields))
        tokenizer = manifest.tokenizer.model_dump(exclude={"backend"})
        return json_hash(
            [shards, counts, tokenizer, manifest.token_dtype, manifest.prompt_key is not None]
        )

    @cached_property
    def _shard(self) -> Callable[[int], Shard]:
        """A shard that is kept open, by this process alone."""
        return lru_cache(_MAX_OPEN_SHARDS)(self._opened)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The ids [start, stop). Raises DataError where an id is beyond the vocabulary, or a file cannot be read."""
        pieces = []
        vocab_size = self.manifest.tokenizer.vocab_size
        for shard, low, high, _ in self._pieces(start, stop):
            ids = shard.read(low, high)
            if ids.min() < 0 or ids.max() >= vocab_size:
                at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
                raise DataError(
                    f"{shard.bin_path}: document {shard.document_at(low + at)}: expected ids below {vocab_size}, found "
                    f"{ids[at]}; {self._advice}"
                )
            pieces.append(ids)
        return np.concatenate(pieces).astype(np.int64)

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The positions in [start, stop) at which a document begins, ascending."""
        pieces = [
            shard.document_starts(low, high) + before
            for shard, low, high, before in self._pieces(start, stop)
        ]
        return np.concatenate(pieces)

    def prompt_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Which of the ids [start, stop) belong to a prompt; None in a corpus without prompts."""
        if self.manifest.prompt_key is None:
            return None
        return np.concatenate(
            [shard.prompt_mask(low, high) for shard, low, high, _ in self._pieces(start, stop)]
        )

    def locate_document(self, document: int) -> tuple[Shard, int]:
        """The shard that holds a document of the corpus, and the document's number in it."""
        for number, shard in enumerate(self.manifest.shards):
            if document < shard.documents:
                return self._shard(number), document
            document -= shard.documents
        raise IndexError(f"{self.folder} has {self.manifest.documents} documents")

    def check(
        self, *, sampled: int | None = SAMPLED_BYTES, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Compares the shards with the manifest: all sizes, indexes and lengths of prompts, and some tokens.

        Args:
            sampled: how many bytes of tokens, of shards drawn at random, are compared; None: all.
            share: (k, n): only the k-th of n shares of the shards.

        Raises:
            DataError: a file is missing, damaged, or differs from the manifest.
        """
        k, n = share
        numbers = range(len(self.manifest.shards))[k::n]
        drawn: set[int] = set()
        size = 0
        for number in random.Random().sample(numbers, len(numbers)):
            if sampled is None or size < sampled:
                drawn.add(number)
                size += self.manifest.shards[number].files[".bin"].bytes

        def check_shard(number: int) -> None:
            self._checked.discard(number)
            self._opened(number, whole=number in drawn)

        with progress_bar(f"checking {self.folder}", len(numbers), " shards") as bar:
            for _ in in_threads(check_shard, numbers):
                bar.update(1)

    def _pieces(self, start: int, stop: int) -> list[tuple[Shard, int, int, int]]:
        """The shards of [start, stop), each with the range within it and the tokens before it."""
        pieces: list[tuple[Shard, int, int, int]] = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            before = self._ends[number] - self.manifest.shards[number].tokens
            high = min(stop, self._ends[number])
            pieces.append((self._shard(number), start - before, high - before, before))
            start, number = high, number + 1
        return pieces

    def _opened(self, number: int, *, whole: bool = False) -> Shard:
        """A shard; the first time it is compared with its record, of its tokens only the size if not `whole`."""
        described = self.manifest.shards[number]
        prefix = self.folder / described.name
        if number not in self._checked:
            for end, content in described.files.items():
                check_file(
                    shard_file(prefix, end), content, self._advice, whole=whole or end != ".bin"
                )
        shard = Shard(prefix)
        self._checked.add(number)
        return shard
