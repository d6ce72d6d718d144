"""Answers to prompts: what is stored, that prompts are recognized, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.token_shards import PromptedShard, shard_file
from pipeline.errors import DataError
from tests.data.helpers import documents, stories_tokenizer, tokenize

PAIRS = [(f"Who is {number}?\nAnswer:", answer) for number, answer in enumerate(documents(120))]


def write_pairs(path: Path, pairs: list[tuple[str, str]] = PAIRS, *more: object) -> Path:
    records = [*({"question": prompt, "text": answer} for prompt, answer in pairs), *more]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def expected(prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """What is read, and what is predicted."""
    encode = stories_tokenizer().reference.encode
    return [1, *encode([prompt]).ids.tolist()], [*encode([answer]).ids.tolist(), 2]


def stored(folder: Path) -> list[tuple[list[int], list[int]]]:
    corpus = TokenCorpus(folder)
    ids, prompts = corpus.read(0, corpus.tokens), corpus.prompt_mask(0, corpus.tokens)
    bounds = [*corpus.document_starts(0, corpus.tokens), corpus.tokens]
    spans = [slice(*bound) for bound in itertools.pairwise(bounds)]
    return [(list(ids[span][prompts[span]]), list(ids[span][~prompts[span]])) for span in spans]


@pytest.mark.parametrize("unit_bytes", [700, 10**9])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompt_and_answer_are_encoded_separately_and_recognized(tmp_path: Path, kind: str, unit_bytes: int):
    path = write_pairs(tmp_path / "x.jsonl")
    if kind == "parquet":
        path = tmp_path / "x.parquet"
        columns = {"text": [answer for _, answer in PAIRS], "question": [prompt for prompt, _ in PAIRS]}
        pq.write_table(pa.table(columns), path, row_group_size=7)
    made = tokenize(tmp_path / "out", path, prompt_key="question", unit_bytes=unit_bytes)
    assert stored(tmp_path / "out") == [expected(*pair) for pair in PAIRS]
    assert len(made.shards) > 3 if unit_bytes == 700 else len(made.shards) == 1
    assert made.prompt_tokens == sum(len(expected(*pair)[0]) for pair in PAIRS)
    assert made.prompt_bytes == sum(len(prompt.encode()) for prompt, _ in PAIRS)
    assert made.bytes == sum(len((prompt + answer).encode()) for prompt, answer in PAIRS)


def test_the_prompt_mask_of_any_range_of_tokens(tmp_path: Path):
    tokenize(tmp_path / "out", write_pairs(tmp_path / "x.jsonl"), prompt_key="question", unit_bytes=700)
    corpus = TokenCorpus(tmp_path / "out")
    whole = corpus.prompt_mask(0, corpus.tokens)
    for start, stop in np.sort(np.random.default_rng(0).integers(0, corpus.tokens, (200, 2))):
        if start < stop:
            assert np.array_equal(corpus.prompt_mask(start, stop), whole[start:stop])


def test_records_without_a_usable_prompt_are_rejected(tmp_path: Path):
    bad = [{"text": "an answer"}, {"text": "an answer", "question": 7}, {"text": "an answer", "question": " "}]
    path = write_pairs(tmp_path / "x.jsonl", PAIRS, *bad, {"question": "and?"})
    made = tokenize(tmp_path / "out", path, prompt_key="question")
    assert made.rejected == {"no_prompt_key": 1, "no_text_key": 1, "prompt_not_usable": 2}
    assert made.documents == len(PAIRS)


def test_lines_of_text_have_no_prompts(tmp_path: Path):
    (tmp_path / "x.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"x\.txt: a line has no 'question'"):
        tokenize(tmp_path / "out", tmp_path / "x.txt", prompt_key="question")


def test_a_column_that_is_missing_is_named(tmp_path: Path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="has no column 'question'; set --prompt-key to one of: text"):
        tokenize(tmp_path / "out", tmp_path / "x.parquet", prompt_key="question")


def test_a_corpus_without_its_prompts_is_refused(tmp_path: Path):
    path = write_pairs(tmp_path / "x.jsonl")
    tokenize(tmp_path / "out", path, prompt_key="question")
    lengths_file = shard_file(tmp_path / "out" / "00000-000000", ".prompts.npy")
    whole = np.load(lengths_file)
    np.save(lengths_file, whole + 1)
    with pytest.raises(DataError, match=r"prompts\.npy: damaged: the bytes 0 to"):
        TokenCorpus(tmp_path / "out").check()
    for content, message in ((whole[:-1], r"expected 120 lengths, found an array of \(119,\)"), (None, "not an array")):
        lengths_file.write_bytes(b"no array") if content is None else np.save(lengths_file, content)
        with pytest.raises(DataError, match=rf"prompts\.npy: {message}"):
            PromptedShard(tmp_path / "out" / "00000-000000")
