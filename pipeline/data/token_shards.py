"""Token shards in Megatron's format: `<shard>.bin` holds the ids, `<shard>.idx` where each document begins.

Layout of `.idx` (little endian): magic, version, type code, number of sequences, number of document ends; then lengths
(int32) and byte offsets (int64) of the sequences, and the first sequence of each document (int64). Our writer makes one
sequence per document; the reader accepts several. All offsets are 64-bit.

In a corpus with prompts `<shard>.prompts.npy` (NumPy's format, int32) holds one number per document: how many of its
first tokens are the prompt and what precedes it (a BOS). These tokens are read, but never predicted.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt

from pipeline.data.file_content import FileContent, HashedFile, hashed_file
from pipeline.errors import DataError, faults_of_library

ShardFile = Literal[".bin", ".idx", ".prompts.npy"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
# Bounds the memory in which a large index is checked.
_CHECKED_AT_A_TIME = 2**20
_ADVICE = "copy the shard again, or make it again"
# Megatron's own limit for 16 bits.
_UINT16_VOCABULARY = 65_500


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that stores ids below `vocab_size`: uint16 if they fit, else int32."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32)


class ShardWriter:
    """Appends documents to a `.bin` file, which `open_bin` opens with the first one, and writes the other files.

    Attributes:
        files: what the published files hold, once `writing_shard` has ended.
    """

    def __init__(self, open_bin: Callable[[], HashedFile], dtype: np.dtype[Any]) -> None:
        self._open = open_bin
        self._dtype = dtype
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._prompt_lengths: list[npt.NDArray[np.int32]] = []
        self.documents = 0
        self.tokens = 0
        self.files: dict[ShardFile, FileContent] = {}

    def add(
        self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any], prompt_lengths: npt.NDArray[Any] | None = None
    ) -> None:
        """Appends documents: their joined `ids: [T]` and their `lengths: [documents]`, which sum to T.

        `prompt_lengths: [documents]`: how many tokens of each are prompt; given for all documents or for none.
        """
        self._bin.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self._lengths.append(lengths.astype(np.int32))
        if prompt_lengths is not None:
            self._prompt_lengths.append(prompt_lengths.astype(np.int32))
        self.documents += len(lengths)
        self.tokens += len(ids)

    @cached_property
    def _bin(self) -> HashedFile:
        return self._open()

    def publish_others(self, prefix: Path, scratch: Path | None) -> None:
        """Publishes the index, and the lengths of the prompts if there are any."""
        self.files[".bin"] = self._bin.content
        with hashed_file(shard_files(prefix)[1], scratch) as file:
            self._write_index(file)
        self.files[".idx"] = file.content
        if self._prompt_lengths:
            with hashed_file(prompts_file(prefix), scratch) as file:
                np.save(cast("BinaryIO", file), np.concatenate(self._prompt_lengths), allow_pickle=False)
            self.files[".prompts.npy"] = file.content

    def _write_index(self, file: HashedFile) -> None:
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        ends = np.cumsum(lengths, dtype=np.int64)
        file.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[self._dtype], len(lengths), len(lengths) + 1))
        file.write(lengths.data)
        file.write(((ends - lengths) * self._dtype.itemsize).data)
        file.write(np.arange(len(lengths) + 1, dtype=np.int64).data)


@contextlib.contextmanager
def writing_shard(prefix: Path, dtype: np.dtype[Any], scratch: Path | None = None) -> Iterator[ShardWriter]:
    """A writer whose files are published when the block ends. Without documents there are none."""
    with contextlib.ExitStack() as opened:
        writer = ShardWriter(lambda: opened.enter_context(hashed_file(shard_files(prefix)[0], scratch)), dtype)
        yield writer
    # Never publish an empty shard and remove it again: another job may be writing the same unit.
    if writer.documents > 0:
        writer.publish_others(prefix, scratch)


def shard_files(prefix: Path) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` of a shard."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


class Shard:
    """An open `<prefix>.bin` and `<prefix>.idx`. Ids are read when asked for.

    With `check` the whole index is compared with itself and with the size of the `.bin`: each sequence begins where the
    one before it ends, and documents follow each other. Without, it is trusted.

    Attributes:
        dtype: the type of a stored id.
        documents: the number of documents.
        tokens: the number of ids.

    Raises:
        DataError: a file is missing, is not of this format, contradicts itself, or has another size than the index
            says.
    """

    def __init__(self, prefix: Path, *, check: bool = True) -> None:
        self.prefix = prefix
        self.bin_path, self.idx_path = shard_files(prefix)
        try:
            with self.idx_path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise DataError(f"{self.idx_path}: expected a token index, found an empty file; {_ADVICE}")
                self._index = np.memmap(file, dtype=np.uint8, mode="r")
            bin_bytes = self.bin_path.stat().st_size
        except FileNotFoundError as error:
            raise DataError(f"{error.filename}: no such file; a token shard is a .bin and an .idx") from None
        self.dtype, self._sequences, self._ends = self._read_header()
        self.documents = self._ends - 1
        self.tokens = self._tokens_in_index()
        if check:
            self._check_index()
        if bin_bytes != self.tokens * self.dtype.itemsize:
            raise DataError(
                f"{self.bin_path}: expected {self.tokens} tokens of {self.dtype}, found {bin_bytes} bytes; {_ADVICE}"
            )

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        header = self._index[: _HEADER.size].tobytes()
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise DataError(f"{self.idx_path}: not an index in Megatron's format; {_ADVICE}")
        _, version, code, sequences, ends = _HEADER.unpack(header)
        expected = _HEADER.size + sequences * 12 + ends * 8
        if version != _VERSION or code not in _DTYPES or ends < 1 or len(self._index) < expected:
            raise DataError(
                f"{self.idx_path}: damaged index: expected {expected} bytes, found {len(self._index)}; {_ADVICE}"
            )
        dtype = np.dtype(_DTYPES[code])
        if dtype.kind not in "iu":
            raise DataError(f"{self.idx_path}: holds {dtype}, expected integer token ids; {_ADVICE}")
        return dtype, int(sequences), int(ends)

    def _array(self, offset: int, count: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.frombuffer(self._index, dtype=dtype, count=count, offset=offset)

    def _check_index(self) -> None:
        """Raises DataError where a sequence does not begin at the end of the one before it, or a document goes back."""
        position = 0  # in bytes
        for at in range(0, self._sequences, _CHECKED_AT_A_TIME):
            lengths = self._array(_HEADER.size + at * 4, min(_CHECKED_AT_A_TIME, self._sequences - at), np.int32)
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize + position
            starts = self._pointers[at : at + len(lengths)]
            if lengths.min() < 0 or starts[0] != position or (starts[1:] != ends[:-1]).any():
                raise DataError(
                    f"{self.idx_path}: damaged index: sequences {at} to {at + len(lengths)} do not follow each other; "
                    f"{_ADVICE}"
                )
            position = int(ends[-1])
        firsts = self._first_sequences
        ordered = all(
            (np.diff(firsts[at : at + _CHECKED_AT_A_TIME + 1]) >= 0).all()
            for at in range(0, self.documents, _CHECKED_AT_A_TIME)
        )
        if firsts[0] != 0 or firsts[-1] != self._sequences or not ordered:
            raise DataError(f"{self.idx_path}: damaged index: documents do not follow each other; {_ADVICE}")

    @cached_property
    def _pointers(self) -> npt.NDArray[np.int64]:
        return self._array(_HEADER.size + self._sequences * 4, self._sequences, np.int64)

    @cached_property
    def _first_sequences(self) -> npt.NDArray[np.int64]:
        """The first sequence of each document, and the number of sequences."""
        return self._array(_HEADER.size + self._sequences * 12, self._ends, np.int64)

    def _tokens_in_index(self) -> int:
        if self._sequences == 0:
            return 0
        last_length = int(self._array(_HEADER.size + (self._sequences - 1) * 4, 1, np.int32)[0])
        return int(self._pointers[-1]) // self.dtype.itemsize + last_length

    def document_start(self, document: int) -> int:
        """The position at which `document` begins; for `document == documents`, the number of tokens."""
        sequence = int(self._first_sequences[document])
        if sequence == self._sequences:
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
        """The ids [start, stop), in their stored type."""
        expected = (stop - start) * self.dtype.itemsize
        try:
            raw = os.pread(self._file.fileno(), expected, start * self.dtype.itemsize)
        except OSError as error:
            raise DataError(f"{self.bin_path}: cannot be read ({error.strerror}); {_ADVICE}") from None
        if len(raw) != expected:
            raise DataError(
                f"{self.bin_path}: expected {expected} bytes from token {start} on, found {len(raw)}: it was cut while "
                f"it was in use; {_ADVICE}"
            )
        return np.frombuffer(raw, dtype=self.dtype)

    @cached_property
    def _file(self) -> BinaryIO:
        try:
            return self.bin_path.open("rb")
        except FileNotFoundError:
            raise DataError(f"{self.bin_path}: was removed while it was in use; {_ADVICE}") from None

    def document(self, document: int) -> npt.NDArray[Any]:
        """The ids of one document."""
        return self.read(self.document_start(document), self.document_start(document + 1))

    def close(self) -> None:
        """Closes the `.bin` file; a later read opens it again."""
        file = self.__dict__.pop("_file", None)
        if file is not None:
            file.close()

    def __del__(self) -> None:
        self.close()


def prompts_file(prefix: Path) -> Path:
    """The `.prompts.npy` of a shard."""
    return prefix.with_name(prefix.name + ".prompts.npy")


class PromptedShard(Shard):
    """An open shard of documents with prompts.

    Raises:
        DataError: a file is missing or damaged, or the files do not belong together.
    """

    def __init__(self, prefix: Path, *, check: bool = True) -> None:
        super().__init__(prefix, check=check)
        path = prompts_file(prefix)
        if not path.exists():
            raise DataError(f"{path}: no such file; every shard of a corpus with prompts has one")
        with faults_of_library(f"{path}: not an array in NumPy's format; {_ADVICE}", DataError):
            self._prompt_lengths: npt.NDArray[np.int32] = np.lib.format.open_memmap(path, mode="r")
        found = self._prompt_lengths
        if found.dtype != np.int32 or found.shape != (self.documents,):
            raise DataError(
                f"{path}: expected {self.documents} lengths of int32, found {found.shape} of {found.dtype}; {_ADVICE}"
            )
        if check and ((found < 0) | (found > self._document_lengths())).any():
            raise DataError(f"{path}: damaged: a prompt is longer than its document; {_ADVICE}")

    def _document_lengths(self) -> npt.NDArray[np.int64]:
        starts = np.append(self._pointers, self.tokens * self.dtype.itemsize)[self._first_sequences]
        return np.diff(starts) // self.dtype.itemsize

    def prompt_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the tokens [start, stop) belong to a prompt."""
        mask = np.zeros(stop - start, dtype=np.bool_)
        for document in range(self.document_at(start), self.document_at(stop - 1) + 1):
            first = self.document_start(document)
            mask[max(0, first - start) : max(0, first + int(self._prompt_lengths[document]) - start)] = True
        return mask
