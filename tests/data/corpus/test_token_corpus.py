"""Shards are read as one sequence; damage to them is found: never accepted in silence, never a
traceback."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.corpus.indexed_dataset import check_file, content_of, writing_shard
from pipeline.data.corpus.manifest import Manifest, ShardRecord, TokenizerRecord
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.errors import DataError
from tests.data.helpers import contents, documents, tokenize, write_jsonl
from tests.programs import scale_cpt

SETTINGS = {"heldout_fraction": 0.2, "unit_bytes": 1500}


@pytest.fixture(scope="module")
def finished(module_folder: Path) -> Path:
    """A folder with a corpus, its held-out part, and what it was made of."""
    source = write_jsonl(module_folder / "x.jsonl", [*documents(60), 7, *documents(10, seed=1)])
    tokenize(module_folder / "finished" / "corpus", source, **SETTINGS)
    return module_folder / "finished"


def changed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flip": lambda content: changed(content, random.Random(len(content)).randrange(len(content))),
    "cut": lambda content: content[:-3],
    "zeros": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_finished_corpus_is_not_complete(finished: Path, tmp_path: Path, damage: str):
    """Neither for the job that made it nor for inspection and training."""
    tried = 0
    kinds = ("*.bin", "*.idx", "manifest.json")
    for path in (path for kind in kinds for path in finished.rglob(kind)):
        content = path.read_bytes()
        made = DAMAGE[damage](content)
        if made == content or (
            damage == "flip" and path.suffix == ".json"
        ):  # our own JSON is trusted if it is whole
            continue
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        victim = shutil.copytree(finished, tmp_path / "copy") / path.relative_to(finished)
        victim.write_bytes(made)
        with pytest.raises(DataError, match=victim.name) as error:
            tokenize(tmp_path / "copy" / "corpus", finished.parent / "x.jsonl", **SETTINGS)
        assert "\n" not in str(error.value)
        with pytest.raises(DataError, match=victim.name):
            TokenCorpus(victim.parent).check(sampled=None)
        tried += 1
    assert tried > 3


def test_what_is_done_about_a_damaged_corpus(finished: Path, tmp_path: Path):
    corpus = shutil.copytree(finished, tmp_path / "copy") / "corpus"
    first = corpus / "00000-000000.bin"
    first.write_bytes(changed(first.read_bytes(), 5))
    done = scale_cpt("inspect-data", corpus, "--verify")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {first}: damaged: expected ")
    assert (
        f"copy the corpus again, or remove the folder {corpus} and start scale-cpt tokenize"
        in done.stderr
    )
    first.unlink()
    with pytest.raises(DataError, match=rf"{first.name}: no such file"):
        TokenCorpus(corpus).check()
    shutil.rmtree(corpus)
    tokenize(corpus, finished.parent / "x.jsonl", **SETTINGS)
    assert [*contents(tmp_path / "copy").values()] == [*contents(finished).values()]
    assert (
        "every byte is the one that was written"
        in scale_cpt("inspect-data", corpus, "--verify").stdout
    )


def test_an_id_beyond_the_vocabulary_is_named_where_it_is_read(finished: Path, tmp_path: Path):
    corpus = TokenCorpus(shutil.copytree(finished / "corpus", tmp_path / "corpus"))
    last = sorted(corpus.folder.glob("*.bin"))[1]
    last.write_bytes(bytes(last.stat().st_size - 2) + b"\xff\xff")
    with pytest.raises(
        DataError, match=rf"{last.name}: document \d+: expected ids below 512, found 65535"
    ):
        corpus.read(0, corpus.tokens)


def test_files_of_an_earlier_version_are_compared_by_size(tmp_path: Path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"12345")
    found = content_of(path)
    path.write_bytes(b"12346")
    check_file(path, found, "", whole=False)
    check_file(path, found._replace(digest=2 * found.digest), "")
    with pytest.raises(
        DataError, match="expected 5 bytes, found other ones than were written; again"
    ):
        check_file(path, found, "again")


# Of each shard the documents, as the lengths of their prompts and answers.
SHARDS = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def corpus_of(folder: Path, shards: list[list[tuple[int, int]]]) -> TokenCorpus:
    """A corpus with prompts, of which each token is its own position."""
    records: list[ShardRecord] = []
    position = 0
    for number, described in enumerate(shards):
        name = f"00000-{number:06d}"
        prompts = np.array([prompt for prompt, _ in described])
        lengths = np.array([prompt + answer for prompt, answer in described])
        stop = position + int(lengths.sum())
        with writing_shard(folder / name, np.dtype(np.uint16)) as writer:
            writer.add(np.arange(position, stop), lengths, prompts)
        records.append(ShardRecord(name, len(described), stop - position, writer.files))
        position = stop
    tokenizer = TokenizerRecord(
        fingerprint="none", vocab_size=1000, document_start=[], document_end=[0], backend="none"
    )
    manifest = Manifest(
        tokenizer=tokenizer,
        text_key="text",
        prompt_key="prompt",
        documents=sum(map(len, shards)),
        tokens=position,
        part="train",
        token_dtype="uint16",
        tokens_per_character=1.0,
        tokens_per_byte=1.0,
        rejected={},
        inputs=[],
        shards=records,
    )
    manifest.save(folder)
    return TokenCorpus(folder)


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.data())
def test_any_range_over_the_shards_is_read_as_of_one_sequence(
    shards: list[list[tuple[int, int]]], data: st.DataObject
):
    documents = [document for shard in shards for document in shard]
    is_prompt = np.concatenate([[True] * prompt + [False] * answer for prompt, answer in documents])
    lengths = [prompt + answer for prompt, answer in documents]
    begins = np.cumsum([0, *lengths])
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(Path(folder), shards)
        start = data.draw(st.integers(0, corpus.tokens - 1), "start")
        stop = data.draw(st.integers(start + 1, corpus.tokens), "stop")
        assert np.array_equal(corpus.read(start, stop), np.arange(start, stop))
        assert np.array_equal(corpus.prompt_mask(start, stop), is_prompt[start:stop])
        expected = [at for at in begins[:-1] if start <= at < stop]
        assert corpus.document_starts(start, stop).tolist() == expected
        for number, length in enumerate(lengths):
            shard, document = corpus.locate_document(number)
            ids = shard.document(document)
            assert ids.tolist() == list(range(begins[number], begins[number] + length))
            assert shard.document_at(shard.document_start(document) + length - 1) == document
