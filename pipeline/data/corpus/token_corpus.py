"""The tokens of a corpus on disk, as one sequence over its shards."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.corpus.indexed_dataset import Shard, check_file, shard_file
from pipeline.data.corpus.manifest import Counts, advice_for, load_manifest
from pipeline.errors import DataError
from pipeline.files.json_files import json_hash
from pipeline.files.threads import in_threads
from pipeline.log import progress_bar

SAMPLED_BYTES = 2**30
"""How much of the tokens is compared where reading all of them would take too long."""
# Of each a file and a memory map are open; a process may often have 1024 files.
_MAX_OPEN_SHARDS = 64


class _Span(NamedTuple):
    """The positions [start, stop) of a shard.

    `offset` is the position in the corpus at which the shard begins.
    """

    shard: Shard
    start: int
    stop: int
    offset: int


class TokenCorpus:
    """The corpus in `folder`: its shards as one sequence of `tokens` ids.

    Each shard is opened when it is needed.

    Raises:
        DataError: it is missing, unfinished, damaged or empty, or its tokenizer is not that of
            `tokenizer_fingerprint`.
    """

    def __init__(self, folder: Path, *, tokenizer_fingerprint: str | None = None) -> None:
        self.folder = folder
        self.manifest = load_manifest(folder)
        self._advice = advice_for(folder)
        found = self.manifest.tokenizer.fingerprint
        if tokenizer_fingerprint is not None and found != tokenizer_fingerprint:
            raise DataError(
                f"{folder}: was tokenized with another tokenizer: expected "
                f"{tokenizer_fingerprint[:24]}…, found {found[:24]}…; make it again with the run's "
                "tokenizer"
            )
        self.tokens = self.manifest.tokens
        if self.tokens == 0:
            fault = "give it documents or leave it out"
            if self.manifest.part == "heldout" and self.manifest.heldout_fraction:
                share = self.manifest.heldout_fraction
                fault = f"heldout_fraction {share} chose no document; set more, or heldout_input"
            raise DataError(f"{folder}: holds no tokens; {fault}")
        # The position in the corpus at which each shard ends.
        self._ends = list(accumulate(shard.tokens for shard in self.manifest.shards))
        self._checked: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """What a process that is given the corpus gets: all but the open shards."""
        # An open file cannot be pickled: the other process opens its own.
        state = dict(vars(self))
        state.pop("_shard", None)
        return state

    @cached_property
    def content(self) -> str:
        """A hash of the tokens and documents of all shards, wherever their text came from.

        The library that encoded is no part of it, nor are the names and the compression of the
        input files.
        """
        shards: list[list[Any]] = []
        for shard in self.manifest.shards:
            files = sorted((end, *content) for end, content in shard.files.items())
            shards.append([shard.documents, shard.tokens, files])
        counts = self.manifest.model_dump(include=set(Counts.model_fields))
        tokenizer = self.manifest.tokenizer.model_dump(exclude={"backend"})
        has_prompts = self.manifest.prompt_key is not None
        return json_hash([shards, counts, tokenizer, self.manifest.token_dtype, has_prompts])

    @property
    def token_bytes(self) -> int:
        """How many bytes the tokens of all shards take."""
        return sum(shard.files[".bin"].bytes for shard in self.manifest.shards)

    @cached_property
    def _shard(self) -> Callable[[int], Shard]:
        """A shard by its number, which is kept open, by this process alone."""
        return lru_cache(_MAX_OPEN_SHARDS)(self._opened)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The ids [start, stop).

        Raises:
            DataError: an id is beyond the vocabulary, or a file cannot be read.
        """
        parts: list[npt.NDArray[Any]] = []
        vocab_size = self.manifest.tokenizer.vocab_size
        for span in self._spans(start, stop):
            ids = span.shard.read(span.start, span.stop)
            # An id beyond the embedding ends in an assert of a CUDA kernel, which names no
            # document.
            if ids.min() < 0 or ids.max() >= vocab_size:
                at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
                document = span.shard.document_at(span.start + at)
                raise DataError(
                    f"{span.shard.bin_path}: document {document}: expected ids below {vocab_size}, "
                    f"found {ids[at]}; {self._advice}"
                )
            # In their stored type until they are joined: int64, which torch indexes with, has four
            # times the bytes.
            parts.append(ids)
        return np.concatenate(parts).astype(np.int64)

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The positions in [start, stop) at which a document begins, ascending."""
        parts: list[npt.NDArray[np.int64]] = []
        for span in self._spans(start, stop):
            parts.append(span.shard.document_starts(span.start, span.stop) + span.offset)
        return np.concatenate(parts)

    def prompt_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Which of the ids [start, stop) belong to a prompt; None in a corpus without prompts."""
        if self.manifest.prompt_key is None:
            return None
        parts: list[npt.NDArray[np.bool_]] = []
        for span in self._spans(start, stop):
            parts.append(span.shard.prompt_mask(span.start, span.stop))
        return np.concatenate(parts)

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
        """Compares the shards with the manifest: all sizes and indexes, and some tokens.

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
        # Other shards in each check: in time all of them are compared.
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

    def _spans(self, start: int, stop: int) -> list[_Span]:
        """The parts of the shards that hold the ids [start, stop), in order."""
        spans: list[_Span] = []
        # The first shard that ends behind `start`.
        # `right`: a shard that ends at `start` does not hold it.
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            offset = self._ends[number] - self.manifest.shards[number].tokens
            end = min(stop, self._ends[number])
            spans.append(_Span(self._shard(number), start - offset, end - offset, offset))
            start = end
            number += 1
        return spans

    def _opened(self, number: int, *, whole: bool = False) -> Shard:
        """Opens a shard.

        The first time it is compared with its record, of its tokens only the size if not `whole`.
        """
        described = self.manifest.shards[number]
        prefix = self.folder / described.name
        if number not in self._checked:
            for end, content in described.files.items():
                # The index is small, and a damaged one may look right.
                hashes = whole or end != ".bin"
                check_file(shard_file(prefix, end), content, self._advice, whole=hashes)
        shard = Shard(prefix)
        self._checked.add(number)
        return shard
