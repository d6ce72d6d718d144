"""Corpora made by Megatron-LM: byte-identical, usable for training, and refused where they are not right."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.checks.door import Opened, faults_of
from pipeline.config.run import load_config
from pipeline.data.corpora import check_heldout, heldout_corpora
from pipeline.data.token_corpus import TokenCorpus, load_manifest
from pipeline.errors import DataError
from tests.data.helpers import documents, run_main, stories, stories_tokenizer, tokenize, write_jsonl
from tests.training.runs import write_config


def write_megatron(prefix: Path, texts: list[list[int]], *, dtype: type = np.uint16, sentences: int = 1) -> Path:
    """What Megatron-LM's IndexedDatasetBuilder writes; `sentences`: a document is split into so many sequences."""
    sequences = [part for ids in texts for part in np.array_split(np.array(ids, dtype), sentences)]
    lengths = np.array([len(part) for part in sequences], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * np.dtype(dtype).itemsize]).astype(
        np.int64
    )
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in sequences))
    code = {np.uint16: 8, np.int32: 4}[dtype]
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(texts) + 1))
        for array in (lengths, pointers, np.arange(0, len(sequences) + 1, sentences, dtype=np.int64)):
            file.write(array.tobytes())
    return prefix


def encoded(texts: list[str]) -> list[list[int]]:
    encode = stories_tokenizer().reference.encode
    return [[1, *encode([text]).ids.tolist(), 2] for text in texts]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_megatron_corpus_is_ours_without_tokenizing(tmp_path, dtype):
    texts = stories(40)
    ours = tokenize(tmp_path / "ours", write_jsonl(tmp_path / "x.jsonl", texts))
    prefix = write_megatron(tmp_path / "their_text_document", encoded(texts), dtype=dtype)
    imported = tokenize(tmp_path / "imported", f"{prefix}.bin")
    assert (imported.documents, imported.tokens) == (ours.documents, ours.tokens)
    # Decoding a text that begins with a space may give another.
    assert (imported.characters, imported.bytes) == pytest.approx((ours.characters, ours.bytes), rel=1e-3)
    found, expected = TokenCorpus(tmp_path / "imported"), TokenCorpus(tmp_path / "ours")
    assert np.array_equal(found.read(0, found.tokens), expected.read(0, expected.tokens))
    for end in (".bin", ".idx"):
        theirs = (tmp_path / f"their_text_document{end}").read_bytes()
        assert (tmp_path / "imported" / f"00000-000000{end}").read_bytes() == theirs
        if dtype is np.uint16:
            assert (tmp_path / "ours" / f"00000-000000{end}").read_bytes() == theirs
    found.check(blocks=None)
    assert tokenize(tmp_path / "imported", f"{prefix}.bin") == imported  # it is complete


def test_the_command_line_and_several_sequences_in_a_document(tmp_path, monkeypatch):
    texts = documents(50)
    prefix = write_megatron(tmp_path / "their", encoded(texts), sentences=3)
    other = write_megatron(tmp_path / "other", encoded(texts[:3]))
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("another file system")))
    tool = ("preprocess_data.py", "--import", prefix, other, "--tokenizer", stories_tokenizer().path)
    done = run_main(*tool, "--output", tmp_path / "out.heldout", "--workers", 1)
    assert done.returncode == 0, done.stderr
    corpus = TokenCorpus(tmp_path / "out.heldout")
    assert corpus.manifest.part == "heldout"
    assert corpus.manifest.documents == 53
    shard, document = corpus.locate_document(51)
    assert stories_tokenizer().decode(shard.document(document)[1:-1]).strip() == texts[1].strip()


def test_a_corpus_without_ends_is_taken_with_a_warning(tmp_path, caplog):
    prefix = write_megatron(tmp_path / "their", [ids[1:-1] for ids in encoded(documents(5))])
    assert tokenize(tmp_path / "out", f"{prefix}.bin").documents == 5
    assert load_manifest(tmp_path / "out").tokenizer.backend == "imported"
    assert any("5 of 5 documents do not end" in record.getMessage() for record in caplog.records)


def test_what_is_not_right_is_refused(tmp_path):
    text = write_jsonl(tmp_path / "x.jsonl", documents(3))
    good = write_megatron(tmp_path / "good", encoded(documents(5)))
    foreign = write_megatron(tmp_path / "foreign", [[1, 511, 2], [1, 512, 2]])
    torn = write_megatron(tmp_path / "torn", encoded(documents(5)))
    os.truncate(tmp_path / "torn.bin", 30)
    alone = tmp_path / "alone.bin"
    alone.write_bytes(b"1234")
    wide = write_megatron(tmp_path / "wide", encoded(documents(5)), dtype=np.int32)
    cases = (
        ([f"{foreign}.bin"], {}, r"foreign.bin: document 1: expected ids from 0 to 511 .* found 1 to 512"),
        ([f"{torn}.bin"], {}, "torn.bin: expected .* tokens of uint16, found 30 bytes"),
        ([alone], {}, "alone.idx: no such file"),
        ([f"{good}.bin", text], {}, "tokens are imported as they are"),
        ([f"{good}.bin"], {"heldout_fraction": 0.1}, "tokens are imported as they are"),
        ([f"{good}.bin", f"{wide}.bin"], {}, "expected ids of one type, found int32, uint16"),
    )
    for number, (inputs, settings, message) in enumerate(cases):
        with pytest.raises(DataError, match=message):
            tokenize(tmp_path / f"out{number}", *inputs, **settings)
        assert not (tmp_path / f"out{number}" / "manifest.json").exists()


def test_imported_held_out_tokens_are_validated_but_not_scored(tmp_path):
    """The dry run says what tokenization and evaluation would not take."""
    prefix = write_megatron(tmp_path / "held", encoded(documents(5)))
    held = {"data__corpora__korean__heldout_input": [f"{prefix}.bin"]}
    config = load_config(write_config(tmp_path / "run", tmp_path / "tokens", **held))
    assert [*heldout_corpora(config)] == ["english"]
    both = {**held, "data__corpora__english__heldout_input": [f"{prefix}.bin"]}
    with pytest.raises(DataError, match="none has held-out text to score"):
        check_heldout(load_config(write_config(tmp_path / "run", tmp_path / "tokens", **both)))

    share = {"data__corpora__korean": {"input": [f"{prefix}.bin"], "heldout_fraction": 0.1}}
    config = load_config(write_config(tmp_path / "run", tmp_path / "tokens", **share))
    assert any("tokens are imported as they are" in str(fault) for fault in faults_of(Opened(config, 2)))
