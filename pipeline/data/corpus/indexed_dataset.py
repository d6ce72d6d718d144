"""Token shards in Megatron's format.

`<shard>.bin` holds the ids, `<shard>.idx` where each document begins.

Layout of `.idx` (little endian): magic, version, type code, number of sequences, number of document
ends; then lengths (int32) and byte offsets (int64) of the sequences, and the first sequence of each
document (int64). All offsets are 64-bit. Our writer makes one sequence per document, and two in a
corpus with prompts: the prompt with what precedes it (a BOS), which is read but never predicted,
and the rest. The reader accepts any number.

A manifest holds the sizes and hashes of these files.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt

from pipeline.errors import DataError
from pipeline.files.hashes import file_hash
from pipeline.files.publishing import published_file

ShardFile = Literal[".bin", ".idx"]

# Digits of a digest: 128 bits, against damage and not against an attacker.
_DIGITS = 32
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Bytes in the index: of a sequence its length and its offset, and of a document its first sequence.
_SEQUENCE_BYTES = 4 + 8
_DOCUMENT_BYTES = 8
_VERSION = 1
# Megatron's codes (`DType` of megatron/core/datasets/indexed_dataset.py); 6 and 7 are floating
# point.
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_ADVICE = "copy the shard again, or make it again"
# Megatron's own limit for 16 bits.
_UINT16_VOCABULARY = 65_500


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that stores ids below `vocab_size`: uint16 if they fit, else int32."""
    # Half the disk and half the reading; Megatron's loader takes the type from the index.
    if vocab_size < _UINT16_VOCABULARY:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


class FileContent(NamedTuple):
    """What a file must hold. `digest`: the first 32 hexadecimal digits of its SHA-256.

    Corpora of earlier versions have digests of several blocks there, of which nothing is compared.
    """

    bytes: NonNegativeInt
    digest: str


def content_of(path: Path) -> FileContent:
    """What a file that was just written holds."""
    return FileContent(path.stat().st_size, file_hash(path)[:_DIGITS])


def check_file(path: Path, content: FileContent, advice: str, *, whole: bool = True) -> None:
    """Compares a file's size, and if `whole` its hash.

    Raises:
        DataError: where it is missing or differs.
    """
    found: str | None = None
    try:
        # The size first: it finds most damage without reading the file.
        size = path.stat().st_size
        if size != content.bytes:
            found = f"found {size}"
        elif whole and _has_other_digest(path, content):
            found = "found other ones than were written"
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {advice}") from None
    if found is not None:
        raise DataError(f"{path}: damaged: expected {content.bytes} bytes, {found}; {advice}")


def _has_other_digest(path: Path, content: FileContent) -> bool:
    """Whether a file is not as it was written; False where an earlier version wrote its digest."""
    if len(content.digest) != _DIGITS:
        return False
    return file_hash(path)[:_DIGITS] != content.digest


class _HashedFile:
    """A file that is hashed while it is written, so that it need not be read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._bytes += memoryview(content).nbytes

    @property
    def content(self) -> FileContent:
        """What the file holds, if nobody else writes it."""
        return FileContent(self._bytes, self._digest.hexdigest()[:_DIGITS])


class ShardWriter:
    """Appends documents to a `.bin` file, which `open_bin` opens with the first one."""

    def __init__(self, open_bin: Callable[[], _HashedFile], dtype: np.dtype[Any]) -> None:
        self._open = open_bin
        self.dtype = dtype
        self.documents = 0
        self.tokens = 0
        self.sequences: list[npt.NDArray[np.int32]] = []
        """The lengths of the sequences, [documents, sequences of each], by the calls of `add`."""
        self.files: dict[ShardFile, FileContent] = {}
        """What the published files hold, once `writing_shard` has ended."""

    def add(
        self,
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[Any],
        prompt_lengths: npt.NDArray[Any] | None = None,
    ) -> None:
        """Appends documents: their joined `ids: [T]`, and their `lengths: [documents]`.

        `prompt_lengths: [documents]`: how many tokens of each are prompt; given for all documents
        or for none.

        Raises:
            DataError: the type of the file cannot hold an id.
        """
        is_checked = ids.dtype == self.dtype == np.uint16  # which holds all its own values
        # A cast to a smaller type wraps ids around without an error.
        if len(ids) and not is_checked:
            lowest = int(ids.min())
            highest = int(ids.max())
            if lowest < 0 or highest > np.iinfo(self.dtype).max:
                raise DataError(
                    f"expected ids that {self.dtype} can hold, found {lowest} to {highest}; the "
                    "tokenizer's files disagree"
                )
        self._bin.write(np.ascontiguousarray(ids, dtype=self.dtype).data)
        parts = [lengths]
        if prompt_lengths is not None:
            parts = [prompt_lengths, lengths - prompt_lengths]
        self.sequences.append(np.column_stack(parts).astype(np.int32))
        self.documents += len(lengths)
        self.tokens += len(ids)

    @cached_property
    def _bin(self) -> _HashedFile:
        return self._open()


@contextlib.contextmanager
def writing_shard(
    prefix: Path, dtype: np.dtype[Any], scratch: Path | None = None
) -> Iterator[ShardWriter]:
    """A writer whose files are published when the block ends. Without documents there are none."""
    written: dict[ShardFile, _HashedFile] = {}
    with contextlib.ExitStack() as opened:

        def opened_file(end: ShardFile) -> _HashedFile:
            file = opened.enter_context(published_file(shard_file(prefix, end), scratch))
            written[end] = _HashedFile(file)
            return written[end]

        # Never publish an empty shard and remove it again: another job may be writing the same
        # unit.
        writer = ShardWriter(lambda: opened_file(".bin"), dtype)
        yield writer
        if writer.documents == 0:
            return
        sequences = np.concatenate(writer.sequences)
        lengths = sequences.ravel()
        # In 64 bits: the sum of 32-bit lengths is beyond 2**31 in a shard of a few GB.
        ends = np.cumsum(lengths, dtype=np.int64)
        # One more than there are documents, as Megatron's document_indices has it: the last one
        # ends the last document.
        firsts = np.arange(writer.documents + 1, dtype=np.int64) * sequences.shape[1]
        index = opened_file(".idx")
        # Lengths before pointers before documents: the order in which Megatron's _IndexReader reads
        # them.
        index.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], len(lengths), len(firsts)))
        # In bytes, not tokens: Megatron's sequence_pointers.
        pointers = (ends - lengths) * dtype.itemsize
        for array in (lengths, pointers, firsts):
            index.write(array.data)
    for end, file in written.items():
        writer.files[end] = file.content


def shard_file(prefix: Path, end: ShardFile) -> Path:
    return prefix.with_name(prefix.name + end)


class Shard:
    """An open `<prefix>.bin` and `<prefix>.idx`.

    Ids are read when asked for, and what the index says is trusted.

    Raises:
        DataError: a file is missing, is not of this format, or has another size than the index
            says.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.bin_path = shard_file(prefix, ".bin")
        self.idx_path = shard_file(prefix, ".idx")
        try:
            bin_bytes = self.bin_path.stat().st_size
            index = self._mapped_index()
        except FileNotFoundError as error:
            raise DataError(
                f"{error.filename}: no such file; a token shard is a .bin and an .idx"
            ) from None
        header = index[: _HEADER.size].tobytes()
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise DataError(f"{self.idx_path}: not an index in Megatron's format; {_ADVICE}")
        _, version, code, sequences, ends = _HEADER.unpack(header)
        expected = _HEADER.size + sequences * _SEQUENCE_BYTES + ends * _DOCUMENT_BYTES
        if version != _VERSION or code not in _DTYPES or ends < 1 or len(index) < expected:
            found = f"expected {expected} bytes of integer ids, found {len(index)}"
            raise DataError(f"{self.idx_path}: damaged index: {found}; {_ADVICE}")
        self.dtype: np.dtype[Any] = np.dtype(_DTYPES[code])
        # Of each sequence its length and the byte where it begins; the first sequence of each
        # document.
        pointers_at = _HEADER.size + sequences * 4
        firsts_at = _HEADER.size + sequences * _SEQUENCE_BYTES
        self._lengths = np.frombuffer(index, np.int32, sequences, _HEADER.size)
        self._pointers = np.frombuffer(index, np.int64, sequences, pointers_at)
        self._first_sequences = np.frombuffer(index, np.int64, ends, firsts_at)
        # The last entry ends the last document.
        self.documents = int(ends) - 1
        self.tokens = 0
        if sequences:
            last_start = int(self._pointers[-1]) // self.dtype.itemsize
            self.tokens = last_start + int(self._lengths[-1])
        if bin_bytes != self.tokens * self.dtype.itemsize:
            raise DataError(
                f"{self.bin_path}: expected {self.tokens} tokens of {self.dtype}, found "
                f"{bin_bytes} bytes; {_ADVICE}"
            )

    def _mapped_index(self) -> npt.NDArray[np.uint8]:
        """The bytes of the index, which are read when they are used."""
        if self.idx_path.stat().st_size == 0:
            # mmap refuses an empty file.
            return np.zeros(0, np.uint8)
        return np.memmap(self.idx_path, np.uint8, "r")

    def check_index(self) -> None:
        """Checks the contents of the index.

        Raises:
            DataError: sequences or documents do not follow each other.
        """
        ends = np.cumsum(self._lengths, dtype=np.int64) * self.dtype.itemsize
        starts = np.append(0, ends)[:-1]
        firsts = self._first_sequences
        sequences_follow = np.array_equal(self._pointers, starts) and (self._lengths >= 0).all()
        documents_follow = (
            firsts[0] == 0 and firsts[-1] == len(self._lengths) and (np.diff(firsts) >= 0).all()
        )
        if not sequences_follow or not documents_follow:
            raise DataError(
                f"{self.idx_path}: damaged index: its documents do not follow each other; {_ADVICE}"
            )

    def document_start(self, document: int) -> int:
        """The position at which `document` begins.

        For `document == documents`, the number of tokens.
        """
        sequence = int(self._first_sequences[document])
        if sequence == len(self._pointers):
            return self.tokens
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def document_at(self, token: int) -> int:
        """The document of the token at a position.

        A binary search, which reads few pages of the index.
        """
        return bisect.bisect_right(range(self.documents), token, key=self.document_start) - 1

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The positions in [start, stop) at which a document begins, ascending."""
        first = self.document_at(start)
        last = self.document_at(stop - 1)
        sequences = self._first_sequences[first : last + 1]
        # The document of `start` may have begun before it.
        starts = self._pointers[sequences] // self.dtype.itemsize
        return starts[starts >= start]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The ids [start, stop), in their stored type.

        Raises:
            DataError: the file has been cut since the shard was opened.
        """
        expected = (stop - start) * self.dtype.itemsize
        # Not a memory map: a file that is cut while it is mapped ends the process by SIGBUS.
        raw = os.pread(self._file.fileno(), expected, start * self.dtype.itemsize)
        if len(raw) != expected:
            raise DataError(
                f"{self.bin_path}: expected {expected} bytes from token {start} on, found "
                f"{len(raw)}: it was cut while it was in use; {_ADVICE}"
            )
        return np.frombuffer(raw, dtype=self.dtype)

    @cached_property
    def _file(self) -> BinaryIO:
        return self.bin_path.open("rb")

    def document(self, document: int) -> npt.NDArray[Any]:
        return self.read(self.document_start(document), self.document_start(document + 1))

    def prompt_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the tokens [start, stop) are in a prompt.

        The prompt is the first of a document's two sequences.
        """
        mask = np.zeros(stop - start, dtype=np.bool_)
        for document in range(self.document_at(start), self.document_at(stop - 1) + 1):
            prompt = int(self._first_sequences[document])
            # The answer, the sequence behind the prompt, begins where the prompt ends.
            first_byte, end_byte = self._pointers[prompt : prompt + 2].tolist()
            first = first_byte // self.dtype.itemsize - start
            end = end_byte // self.dtype.itemsize - start
            mask[max(0, first) : max(0, end)] = True
        return mask
