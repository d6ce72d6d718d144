"""Token shards in Megatron's format: `<shard>.bin` holds the ids, `<shard>.idx` where each document begins.

Layout of `.idx` (little endian): magic, version, type code, number of sequences, number of document ends; then lengths
(int32) and byte offsets (int64) of the sequences, and the first sequence of each document (int64). Our writer makes one
sequence per document; the reader accepts several. All offsets are 64-bit.

In a corpus with prompts `<shard>.prompts.npy` (NumPy's format, int32) holds one number per document: how many of its
first tokens are the prompt and what precedes it (a BOS). These tokens are read, but never predicted.

A manifest holds the sizes of these files and the hashes of their blocks, to be compared in whole or in part.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, NonNegativeInt

from pipeline.errors import DataError, faults_of_library
from pipeline.files import published_file

ShardFile = Literal[".bin", ".idx", ".prompts.npy"]

BLOCK_BYTES = 4 * 2**20
HASH_DIGITS = 32
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_ADVICE = "copy the shard again, or make it again"
# Megatron's own limit for 16 bits.
_UINT16_VOCABULARY = 65_500


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that stores ids below `vocab_size`: uint16 if they fit, else int32."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32)


class FileContent(NamedTuple):
    """What a file must hold: `blocks` are the hashes of its blocks of BLOCK_BYTES, the last of which may be shorter.

    A hash is the first HASH_DIGITS hexadecimal digits of the SHA-256. They are one text: a corpus of terabytes has a
    million blocks. Earlier versions wrote a list.
    """

    bytes: NonNegativeInt
    blocks: Annotated[str, BeforeValidator(lambda found: "".join(map(str, found)) if type(found) is list else found)]


def content_of(path: Path) -> FileContent:
    """What a file that was just written holds."""
    with path.open("rb") as file:
        blocks = "".join(_digits(block) for block in iter(lambda: file.read(BLOCK_BYTES), b""))
        return FileContent(file.tell(), blocks)


def check_file(path: Path, content: FileContent, advice: str, *, blocks: Iterable[int] | None = None) -> None:
    """Compares the size of a file and some of its blocks, by default all.

    Raises:
        DataError: it is missing or differs.
    """
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) != content.bytes:
                raise DataError(f"{path}: expected {content.bytes} bytes, found {size}; {advice}")
            for number in range(-(-size // BLOCK_BYTES)) if blocks is None else blocks:
                start = number * BLOCK_BYTES
                block = os.pread(file.fileno(), BLOCK_BYTES, start)
                if _digits(block) != content.blocks[number * HASH_DIGITS : (number + 1) * HASH_DIGITS]:
                    raise DataError(
                        f"{path}: damaged: the bytes {start} to {start + len(block)} are not those that were written; "
                        f"{advice}"
                    )
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {advice}") from None


def _digits(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()[:HASH_DIGITS]


class ShardWriter:
    """Appends documents to a `.bin` file, which `open_bin` opens with the first one.

    Attributes:
        files: what the published files hold, once `writing_shard` has ended.
    """

    def __init__(self, open_bin: Callable[[], BinaryIO], dtype: np.dtype[Any]) -> None:
        self._open = open_bin
        self.dtype = dtype
        self.lengths: list[npt.NDArray[np.int32]] = []
        self.prompt_lengths: list[npt.NDArray[np.int32]] = []
        self.documents = 0
        self.tokens = 0
        self.files: dict[ShardFile, FileContent] = {}

    def add(
        self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any], prompt_lengths: npt.NDArray[Any] | None = None
    ) -> None:
        """Appends documents: their joined `ids: [T]` and their `lengths: [documents]`, which sum to T.

        `prompt_lengths: [documents]`: how many tokens of each are prompt; given for all documents or for none.
        """
        self._bin.write(np.ascontiguousarray(ids, dtype=self.dtype).data)
        self.lengths.append(lengths.astype(np.int32))
        if prompt_lengths is not None:
            self.prompt_lengths.append(prompt_lengths.astype(np.int32))
        self.documents += len(lengths)
        self.tokens += len(ids)

    @cached_property
    def _bin(self) -> BinaryIO:
        return self._open()


@contextlib.contextmanager
def writing_shard(prefix: Path, dtype: np.dtype[Any], scratch: Path | None = None) -> Iterator[ShardWriter]:
    """A writer whose files are published when the block ends. Without documents there are none."""
    with contextlib.ExitStack() as opened:

        def opening(end: ShardFile) -> BinaryIO:
            return opened.enter_context(published_file(shard_file(prefix, end), scratch))

        # Never publish an empty shard and remove it again: another job may be writing the same unit.
        writer = ShardWriter(lambda: opening(".bin"), dtype)
        yield writer
        if writer.documents == 0:
            return
        lengths = np.concatenate(writer.lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        index = opening(".idx")
        index.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], len(lengths), len(lengths) + 1))
        for array in (lengths, (ends - lengths) * dtype.itemsize, np.arange(len(lengths) + 1, dtype=np.int64)):
            index.write(array.data)
        if writer.prompt_lengths:
            np.save(opening(".prompts.npy"), np.concatenate(writer.prompt_lengths), allow_pickle=False)
    published: list[ShardFile] = [".bin", ".idx"]
    if writer.prompt_lengths:
        published.append(".prompts.npy")
    writer.files = {end: content_of(shard_file(prefix, end)) for end in published}


def shard_file(prefix: Path, end: ShardFile) -> Path:
    """A file of a shard."""
    return prefix.with_name(prefix.name + end)


class Shard:
    """An open `<prefix>.bin` and `<prefix>.idx`. Ids are read when asked for, and what the index says is trusted.

    Attributes:
        dtype: the type of a stored id.
        documents: the number of documents.
        tokens: the number of ids.

    Raises:
        DataError: a file is missing, is not of this format, or has another size than the index says.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.bin_path, self.idx_path = shard_file(prefix, ".bin"), shard_file(prefix, ".idx")
        try:
            bin_bytes = self.bin_path.stat().st_size
            # mmap refuses an empty file.
            index = np.memmap(self.idx_path, np.uint8, "r") if self.idx_path.stat().st_size else np.zeros(0, np.uint8)
        except FileNotFoundError as error:
            raise DataError(f"{error.filename}: no such file; a token shard is a .bin and an .idx") from None
        header = index[: _HEADER.size].tobytes()
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise DataError(f"{self.idx_path}: not an index in Megatron's format; {_ADVICE}")
        _, version, code, sequences, ends = _HEADER.unpack(header)
        expected = _HEADER.size + sequences * 12 + ends * 8
        if version != _VERSION or code not in _DTYPES or ends < 1 or len(index) < expected:
            found = f"expected {expected} bytes of integer ids, found {len(index)}"
            raise DataError(f"{self.idx_path}: damaged index: {found}; {_ADVICE}")
        self.dtype: np.dtype[Any] = np.dtype(_DTYPES[code])
        # Of each sequence its length and the byte where it begins; the first sequence of each document.
        self._lengths = np.frombuffer(index, np.int32, sequences, _HEADER.size)
        self._pointers = np.frombuffer(index, np.int64, sequences, _HEADER.size + sequences * 4)
        self._first_sequences = np.frombuffer(index, np.int64, ends, _HEADER.size + sequences * 12)
        self.documents = int(ends) - 1
        self.tokens = 0 if not sequences else int(self._pointers[-1]) // self.dtype.itemsize + int(self._lengths[-1])
        if bin_bytes != self.tokens * self.dtype.itemsize:
            raise DataError(
                f"{self.bin_path}: expected {self.tokens} tokens of {self.dtype}, found {bin_bytes} bytes; {_ADVICE}"
            )

    def check_index(self) -> None:
        """Raises DataError where a sequence does not begin at the end of the one before it, or a document goes back."""
        ends, firsts = np.cumsum(self._lengths, dtype=np.int64) * self.dtype.itemsize, self._first_sequences
        follow = np.array_equal(self._pointers, np.append(0, ends)[:-1]) and (self._lengths >= 0).all()
        if not follow or firsts[0] != 0 or firsts[-1] != len(self._lengths) or (np.diff(firsts) < 0).any():
            raise DataError(f"{self.idx_path}: damaged index: its documents do not follow each other; {_ADVICE}")

    def document_start(self, document: int) -> int:
        """The position at which `document` begins; for `document == documents`, the number of tokens."""
        sequence = int(self._first_sequences[document])
        if sequence == len(self._pointers):
            return self.tokens
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def document_at(self, token: int) -> int:
        """The document of the token at position `token`, by a binary search that reads few pages of the index."""
        return bisect.bisect_right(range(self.documents), token, key=self.document_start) - 1

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The positions in [start, stop) at which a document begins, ascending."""
        sequences = self._first_sequences[self.document_at(start) : self.document_at(stop - 1) + 1]
        starts = self._pointers[sequences] // self.dtype.itemsize
        return starts[starts >= start]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The ids [start, stop), in their stored type. Raises DataError where the file has been cut since."""
        expected = (stop - start) * self.dtype.itemsize
        raw = os.pread(self._file.fileno(), expected, start * self.dtype.itemsize)
        if len(raw) != expected:
            raise DataError(
                f"{self.bin_path}: expected {expected} bytes from token {start} on, found {len(raw)}: it was cut while "
                f"it was in use; {_ADVICE}"
            )
        return np.frombuffer(raw, dtype=self.dtype)

    @cached_property
    def _file(self) -> BinaryIO:
        return self.bin_path.open("rb")

    def document(self, document: int) -> npt.NDArray[Any]:
        """The ids of one document."""
        return self.read(self.document_start(document), self.document_start(document + 1))


class PromptedShard(Shard):
    """An open shard of documents with prompts.

    Raises:
        DataError: as `Shard`, or the prompts are not those of its documents.
    """

    def __init__(self, prefix: Path) -> None:
        super().__init__(prefix)
        path = shard_file(prefix, ".prompts.npy")
        with faults_of_library(f"{path}: not an array in NumPy's format; {_ADVICE}", DataError):
            self._prompt_lengths: npt.NDArray[np.int32] = np.lib.format.open_memmap(path, mode="r")
        if (found := self._prompt_lengths).shape != (self.documents,):
            raise DataError(f"{path}: expected {self.documents} lengths, found an array of {found.shape}; {_ADVICE}")

    def prompt_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the tokens [start, stop) belong to a prompt."""
        mask = np.zeros(stop - start, dtype=np.bool_)
        for document in range(self.document_at(start), self.document_at(stop - 1) + 1):
            first = self.document_start(document)
            mask[max(0, first - start) : max(0, first + int(self._prompt_lengths[document]) - start)] = True
        return mask
