"""A corpus as one run of tokens: its shards one after the other, opened when they are needed."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.data.token_shards import PromptedShard, Shard
from pipeline.errors import DataError
from pipeline.files import is_plain_name, write_json

# --- What a folder of token shards holds. `manifest.json` is written last: a folder without one is unfinished -------
# It says nothing about when, where or by how many workers it was made: the same corpus gives the same bytes.

NAME = "manifest.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerRecord(_Part):
    """The tokenizer that made the ids; `backend` is the library that encoded: a checked fast path, or the reference."""

    fingerprint: str
    vocab_size: int
    document_start: list[int]
    document_end: list[int]
    backend: str


class InputFile(_Part):
    """A file that was read; `sha256` is of its bytes as they lie on the disk."""

    path: str
    bytes: int
    sha256: str


class ShardRecord(_Part):
    """A `.bin`/`.idx` pair in the manifest's folder."""

    name: str
    documents: int
    tokens: int


class Manifest(_Part):
    """The contents of `manifest.json`. `characters` and `bytes` (UTF-8) count the accepted text of this part.

    `prompt_tokens` and `prompt_bytes` say how much of `tokens` and `bytes` is prompts, in a corpus that has them
    (`prompt_key` is not None); then each shard has a third file, see `prompts.py`.
    """

    format: str = "scale-cpt token corpus 1"
    part: str
    tokenizer: TokenizerRecord
    token_dtype: str
    text_key: str
    prompt_key: str | None = None
    heldout_fraction: float
    documents: int
    tokens: int
    characters: int
    bytes: int
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    tokens_per_character: float
    tokens_per_byte: float
    rejected: dict[str, int]
    inputs: list[InputFile]
    shards: list[ShardRecord]

    def save(self, folder: Path) -> None:
        """Publishes the manifest in `folder`, which makes the corpus whole."""
        write_json(folder / NAME, self.model_dump())


def load_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the corpus in `folder`.

    Raises:
        DataError: there is none, or it is damaged.
    """
    path = folder / NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        state = "is unfinished: start tools/preprocess_data.py again" if folder.is_dir() else "does not exist"
        raise DataError(f"{path}: no such file; the token corpus {folder} {state}") from None
    except ValidationError as error:
        fault: Any = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "the file"
        raise DataError(f"{path}: not a manifest of this project: {where}: {fault['msg']}") from None


# --- Fixed-length samples cut from a corpus' run of tokens: which token is predicted from which, and who may see whom

IGNORED = -100


class Sample(NamedTuple):
    """A sequence, each array int64 [S].

    tokens: what the model reads.
    targets: the token after each, or -100 where nothing is to be predicted.
    positions: counted from the beginning of the document, or of the sample where the document began before it.
    document_ids: 0, 1, ... within the sample; attention never crosses from one to another.
    answer_starts: bool [S]; where the target is the first token behind a prompt.
    """

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int64]
    answer_starts: npt.NDArray[np.bool_]


def pack(
    window: npt.NDArray[Any],
    document_starts: npt.NDArray[np.int64],
    sequence_length: int,
    *,
    padding: int,
    document_mask: bool,
    prompts: npt.NDArray[np.bool_] | None = None,
) -> Sample:
    """Makes a sample of up to `sequence_length + 1` consecutive tokens.

    Args:
        window: the tokens, one more than the sample reads; fewer at the end of a corpus, which is padded.
        document_starts: the places in `window` at which a document begins, ascending.
        sequence_length: S.
        padding: the token to fill up with; never predicted, and a document of its own.
        document_mask: keep documents apart. Otherwise the sample is one run of text, and only padding is set apart.
        prompts: which tokens of `window` are read but never predicted, where there are such.
    """
    present = min(len(window), sequence_length)
    tokens = np.full(sequence_length, padding, dtype=np.int64)
    tokens[:present] = window[:present]
    targets = np.full(sequence_length, IGNORED, dtype=np.int64)
    targets[: len(window) - 1] = window[1:]

    borders = document_starts[(document_starts > 0) & (document_starts <= sequence_length)] if document_mask else _NONE
    if present < sequence_length:
        borders = np.append(borders[borders < present], present)
    targets[borders - 1] = IGNORED
    answer_starts = np.zeros(sequence_length, dtype=np.bool_)
    if prompts is not None:
        targets[: len(window) - 1][prompts[1:]] = IGNORED
        answer_starts[: len(window) - 1] = prompts[:-1] & ~prompts[1:]
    inner = borders[borders < sequence_length]
    starts_here = np.zeros(sequence_length, dtype=np.int64)
    starts_here[inner] = 1
    document_ids = np.cumsum(starts_here)
    begins = np.concatenate([[0], inner])
    positions = np.arange(sequence_length, dtype=np.int64) - begins[document_ids]
    return Sample(tokens, targets, positions, document_ids, answer_starts)


def cuts_between_documents(
    document_starts: npt.NDArray[np.int64], tokens: int, sequence_length: int
) -> npt.NDArray[np.int64]:
    """Where samples of at most `sequence_length` begin, if each holds as many whole documents as fit.

    A document longer than a sample begins one, and goes on in the next, with what follows behind its end.
    """
    borders = [*document_starts.tolist(), tokens]
    cuts = [0]
    while cuts[-1] + sequence_length < tokens:
        furthest = cuts[-1] + sequence_length
        border = borders[bisect.bisect_right(borders, furthest) - 1]
        cuts.append(border if border > cuts[-1] else furthest)
    return np.array(cuts, dtype=np.int64)


_NONE = np.zeros(0, dtype=np.int64)


# --- A corpus as one run of tokens: its shards one after the othe ---

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
