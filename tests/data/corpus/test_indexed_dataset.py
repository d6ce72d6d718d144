"""Our shards and Megatron's are interchangeable, also beyond 2**32 tokens."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.corpus.indexed_dataset import Shard, shard_file, token_dtype, writing_shard
from pipeline.errors import DataError

# Written by megatron-core 0.16.1's IndexedDatasetBuilder: twenty documents of random ids; 3 of 2, 1
# and 3 sequences.
FIXTURES = Path(__file__).parents[1] / "fixtures"
VOCABULARIES = {"uint16": 50_277, "int32": 128_256}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_we_read_and_write_what_megatron_writes(name: str, tmp_path: Path):
    random = np.random.default_rng(7)
    documents = [
        random.integers(0, VOCABULARIES[name], size=int(length))
        for length in random.integers(1, 40, size=20)
    ]
    with writing_shard(tmp_path / "ours", token_dtype(VOCABULARIES[name])) as writer:
        for batch in (documents[:7], documents[7:]):
            writer.add(np.concatenate(batch), np.array([len(document) for document in batch]))
    for end in (".bin", ".idx"):
        theirs = shard_file(FIXTURES / f"megatron_{name}", end)
        assert shard_file(tmp_path / "ours", end).read_bytes() == theirs.read_bytes()
    shard = Shard(FIXTURES / f"megatron_{name}")
    assert (shard.dtype.name, shard.documents, shard.tokens) == (name, 20, sum(map(len, documents)))
    for number, document in enumerate(documents):
        assert np.array_equal(shard.document(number), document)


def test_documents_of_several_sequences_are_read_completely():
    assert [token_dtype(size).name for size in (65_499, 65_500)] == ["uint16", "int32"]
    shard = Shard(FIXTURES / "megatron_sentences")
    assert [list(shard.document(number)) for number in range(3)] == [
        [1, 2, 3],
        [4],
        [5, 6, 7, 8, 9],
    ]
    starts = {(0, 9): [0, 3, 4], (1, 4): [3], (5, 9): []}
    assert {where: list(shard.document_starts(*where)) for where in starts} == starts


def test_beyond_32_bits(tmp_path: Path):
    """A sparse file of five billion tokens, with documents on both sides of 2**32 tokens."""
    lengths = np.array([2**31 - 1, 2**31 - 1, 5, 7, 2**29], dtype=np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    tokens = int(lengths.sum(dtype=np.int64))
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(tokens * 4)
        for document, ids in ((2, range(11, 16)), (3, range(21, 28))):
            file.seek(int(starts[document]) * 4)
            file.write(np.array(ids, np.int32).tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 5, 6)
    index = header + lengths.tobytes() + (starts * 4).tobytes() + np.arange(6).tobytes()
    (tmp_path / "large.idx").write_bytes(index)

    shard = Shard(tmp_path / "large")
    assert shard.tokens == tokens > 2**32
    assert list(shard.document(2)) == list(range(11, 16))
    assert list(shard.document(3)) == list(range(21, 28))
    assert list(shard.read(2**32 - 3, 2**32 + 5)) == [0, 11, 12, 13, 14, 15, 21, 22]
    assert list(shard.document_starts(2**32 - 10, 2**32 + 20)) == [int(at) for at in starts[2:]]
    assert (shard.document_at(2**32 + 3), shard.document_at(tokens - 1)) == (3, 4)


def test_without_documents_or_after_an_error_there_are_no_files(tmp_path: Path):
    with writing_shard(tmp_path / "empty", np.dtype(np.uint16)):
        # Another job that writes the same shard at the same time must not find an empty file.
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), writing_shard(tmp_path / "s", np.dtype(np.uint16)) as writer:
        writer.add(np.arange(5), np.array([5]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_damage_gives_a_one_line_error(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"):
        Shard(tmp_path / "missing")
    with writing_shard(tmp_path / "s", np.dtype(np.uint16)) as writer:
        writer.add(np.arange(9), np.array([2, 3, 4]))
    index = tmp_path / "s.idx"
    whole = index.read_bytes()
    for damaged, message in (
        (b"", "Megatron"),
        (b"PK" + whole, "Megatron"),
        (whole[:60], "damaged index"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            Shard(tmp_path / "s")
    for at in range(
        len(whole) - 3 * 8
    ):  # a document's border that moves to another sequence's is not noticed
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataError):
            Shard(tmp_path / "s").check_index()
    index.write_bytes(whole)
    shard = Shard(tmp_path / "s")
    os.truncate(shard.bin_path, 7)
    with pytest.raises(
        DataError, match=r"s\.bin: expected 8 bytes from token 5 on, found 0: it was cut while"
    ):
        shard.document(2)
    with pytest.raises(DataError, match="expected 9 tokens"):
        Shard(tmp_path / "s")
