"""The tokens of a corpus on disk, as one sequence over its shards."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.corpus.indexed_dataset import Shard, check_file, shard_file
from pipeline.data.corpus.manifest import Counts, advice_for, load_manifest
from pipeline.errors import DataError
from pipeline.files import in_threads, json_hash
from pipeline.log import progress_bar

SAMPLED_BYTES = 2**30
"""How much of the tokens is compared where reading all of them would take too long."""
_MAX_OPEN_SHARDS = 64


class TokenCorpus:
    """The corpus in `folder`: its shards as one sequence of `tokens` ids, each shard opened when it is needed.

    Raises:
        DataError: it is missing, unfinished, damaged or empty, or its tokenizer is not that of `tokenizer_fingerprint`.
    """

    def __init__(self, folder: Path, *, tokenizer_fingerprint: str | None = None) -> None:
        self.folder = folder
        self.manifest = load_manifest(folder)
        self._advice = advice_for(folder)
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
