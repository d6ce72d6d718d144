"""Corpora made by Megatron-LM become those that we would have made, and are refused where they are
not right."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.run import load_config
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.corpora import check_heldout, heldout_corpora
from pipeline.errors import DataError
from tests.data.helpers import documents, stories, stories_tokenizer, tokenize, write_jsonl
from tests.programs import scale_cpt
from tests.training.runs import write_config


def write_megatron(
    prefix: Path, texts: list[list[int]], *, dtype: type = np.uint16, sentences: int = 1
) -> Path:
    """What Megatron-LM's IndexedDatasetBuilder writes; `sentences`: a document is split into so
    many sequences."""
    sequences = [part for ids in texts for part in np.array_split(np.array(ids, dtype), sentences)]
    lengths = np.array([len(part) for part in sequences], np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    firsts = np.arange(0, len(sequences) + 1, sentences, dtype=np.int64)
    header = struct.pack(
        "<QBQQ", 1, {np.uint16: 8, np.int32: 4}[dtype], len(sequences), len(texts) + 1
    )
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in sequences))
    index = b"".join(
        [b"MMIDIDX\x00\x00", header, *(array.tobytes() for array in (lengths, pointers, firsts))]
    )
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix


def encoded(texts: list[str]) -> list[list[int]]:
    encode = stories_tokenizer().reference.encode
    return [[1, *encode([text]).ids.tolist(), 2] for text in texts]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize(
    "frame", [slice(None), slice(1, None), slice(1, -1)], ids=["framed", "end", "bare"]
)
def test_a_megatron_corpus_is_ours_without_tokenizing(tmp_path, dtype, frame):
    """The same bytes, whether its documents have the tokens around them, the end alone
    (--append-eod) or none."""
    texts = stories(40)
    written = write_jsonl(tmp_path / "x.jsonl", texts)
    ours = tokenize(
        tmp_path / "ours", written, special_tokens="control"
    )  # as Megatron-LM, which reads <s> so
    prefix = write_megatron(tmp_path / "their", [ids[frame] for ids in encoded(texts)], dtype=dtype)
    imported = tokenize(tmp_path / "imported", f"{prefix}.bin", unit_bytes=10**9)
    assert imported.shards == ours.shards
    assert imported.tokenizer.backend == "imported"
    # Decoding a text that begins with a space may give another.
    assert (imported.characters, imported.bytes) == pytest.approx(
        (ours.characters, ours.bytes), rel=1e-3
    )
    in_units = tokenize(tmp_path / "units", f"{prefix}.bin", unit_bytes=1000)
    assert len(in_units.shards) > 5
    found, expected = TokenCorpus(tmp_path / "units"), TokenCorpus(tmp_path / "ours")
    assert np.array_equal(found.read(0, found.tokens), expected.read(0, expected.tokens))


def test_the_command_line_and_several_sequences_in_a_document(tmp_path):
    texts = documents(50)
    prefix = write_megatron(tmp_path / "their", encoded(texts), sentences=3)
    other = write_megatron(tmp_path / "other", [*encoded(texts[:3]), []])
    tool = ("tokenize", "--import", prefix, other, "--tokenizer", stories_tokenizer().path)
    done = scale_cpt(
        *tool, "--output", tmp_path / "out.heldout", "--workers", 1, "--max-bad-fraction", "0.1"
    )
    assert done.returncode == 0, done.stderr
    corpus = TokenCorpus(tmp_path / "out.heldout")
    assert corpus.manifest.part == "heldout"
    assert (corpus.manifest.documents, corpus.manifest.rejected) == (53, {"empty_text": 1})
    shard, document = corpus.locate_document(51)
    assert stories_tokenizer().decode(shard.document(document)[1:-1]).strip() == texts[1].strip()


def test_what_is_not_right_is_refused(tmp_path):
    good = write_megatron(tmp_path / "good", encoded(documents(5)))
    foreign = write_megatron(tmp_path / "foreign", [[1, 511, 2], [1, 512, 2]])
    torn = write_megatron(tmp_path / "torn", encoded(documents(5)))
    os.truncate(tmp_path / "torn.bin", 30)
    alone = tmp_path / "alone.bin"
    alone.write_bytes(b"1234")
    cases = (
        (
            f"{foreign}.bin",
            {},
            r"foreign.bin: document 1: expected ids from 0 to 511 .* found 1 to 512",
        ),
        (f"{torn}.bin", {}, "torn.bin: expected .* tokens of uint16, found 30 bytes"),
        (alone, {}, "alone.idx: no such file"),
        (f"{good}.bin", {"prompt_key": "question"}, "a line has no 'question'"),
    )
    for number, (source, settings, message) in enumerate(cases):
        with pytest.raises(DataError, match=message):
            tokenize(tmp_path / f"out{number}", source, **settings)
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
