"""A corpus as one run of tokens: its shards one after the other, opened when they are needed."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.data.manifest import load_manifest
from pipeline.data.packing import Sample, cuts_between_documents, pack
from pipeline.data.prompts import PromptedShard
from pipeline.data.token_shards import Shard
from pipeline.errors import DataError
from pipeline.files import is_plain_name

_OPEN_SHARDS = 64


class TokenSource(Protocol):
    """A run of `tokens` ids in which documents begin at known places."""

    tokens: int

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The ids [start, stop)."""
        ...

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The places in [start, stop) at which a document begins, ascending."""
        ...

    def prompt_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Which of the ids [start, stop) belong to a prompt; None where no document has one."""
        ...


class TokenCorpus:
    """The corpus in `folder`, as its manifest describes it.

    Raises:
        DataError: it is missing, unfinished, damaged or empty, or its tokenizer is not that of `tokenizer_fingerprint`.
    """

    def __init__(self, folder: Path, *, tokenizer_fingerprint: str | None = None) -> None:
        self.folder = folder
        self.manifest = load_manifest(folder)
        found = self.manifest.tokenizer.fingerprint
        if tokenizer_fingerprint is not None and found != tokenizer_fingerprint:
            raise DataError(
                f"{folder}: was tokenized with another tokenizer than the base model's: expected "
                f"{tokenizer_fingerprint[:24]}…, found {found[:24]}…; make it again with the base's own tokenizer"
            )
        self.tokens = self.manifest.tokens
        if self.tokens == 0:
            raise DataError(f"{folder}: holds no tokens; give it documents or leave it out")
        self._ends = list(accumulate(shard.tokens for shard in self.manifest.shards))
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        pieces = [shard.read(low, high) for shard, low, high, _ in self._pieces(start, stop)]
        return np.concatenate(pieces).astype(np.int64)

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        pieces = [shard.document_starts(low, high) + before for shard, low, high, before in self._pieces(start, stop)]
        return np.concatenate(pieces)

    def prompt_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        pieces = [
            shard.prompt_mask(low, high)
            for shard, low, high, _ in self._pieces(start, stop)
            if isinstance(shard, PromptedShard)
        ]
        return np.concatenate(pieces) if pieces else None

    def locate_document(self, document: int) -> tuple[Shard, int]:
        """The shard that holds the corpus' `document`-th document, and the document's number there."""
        for number, shard in enumerate(self.manifest.shards):
            if document < shard.documents:
                return self._shard(number), document
            document -= shard.documents
        raise IndexError(f"{self.folder} has {self.manifest.documents} documents")

    def check(self) -> None:
        """Opens every shard.

        Raises:
            DataError: one is missing, damaged, or not what the manifest says.
        """
        for number in range(len(self.manifest.shards)):
            self._shard(number)

    def _pieces(self, start: int, stop: int) -> list[tuple[Shard, int, int, int]]:
        """The shards that [start, stop) lies in: the range within each, and the tokens before it."""
        pieces: list[tuple[Shard, int, int, int]] = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            before = self._ends[number] - self.manifest.shards[number].tokens
            high = min(stop, self._ends[number])
            pieces.append((self._shard(number), start - before, high - before, before))
            start, number = high, number + 1
        return pieces

    def _shard(self, number: int) -> Shard:
        """The open shard; of very many only the last used stay open."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        described = self.manifest.shards[number]
        if not is_plain_name(described.name):
            raise DataError(f"{self.folder}: its manifest names a shard outside the folder: {described.name!r}")
        shard = (Shard if self.manifest.prompt_key is None else PromptedShard)(self.folder / described.name)
        if shard.tokens != described.tokens or shard.documents != described.documents:
            raise DataError(
                f"{shard.bin_path}: expected {described.tokens} tokens as in the manifest, found {shard.tokens}"
            )
        self._open[number] = shard
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return shard

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict()}


class PackedCorpus:
    """A run of tokens cut into samples of `sequence_length`, each token read exactly once.

    Sample k reads the tokens from k·S to (k+1)·S; the last one is filled up with padding. With `whole_documents` a
    sample ends where the last document ends that fits, and each is filled up: an answer stays with its prompt.
    """

    def __init__(
        self,
        source: TokenSource,
        sequence_length: int,
        *,
        padding: int,
        document_mask: bool,
        whole_documents: bool = False,
    ) -> None:
        self.source = source
        self._sequence_length = sequence_length
        self._padding = padding
        self._document_mask = document_mask
        self._cuts: Sequence[int] | npt.NDArray[np.int64] = range(0, source.tokens, sequence_length)
        if whole_documents:
            self._cuts = cuts_between_documents(
                source.document_starts(0, source.tokens), source.tokens, sequence_length
            )

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = int(self._cuts[index])
        stop = int(self._cuts[index + 1]) if index + 1 < len(self) else self.source.tokens
        if stop - start == self._sequence_length:
            stop = min(stop + 1, self.source.tokens)  # the last target
        starts = self.source.document_starts(start, stop) - start if self._document_mask else np.zeros(0, np.int64)
        return pack(
            self.source.read(start, stop),
            starts,
            self._sequence_length,
            padding=self._padding,
            document_mask=self._document_mask,
            prompts=self.source.prompt_mask(start, stop),
        )
