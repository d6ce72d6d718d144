"""Prompts and answers of records: what is stored, that prompts are recognized, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.errors import DataError
from tests.data.helpers import (
    documents,
    pair_ids,
    stored_pairs,
    tokenize,
)

PAIRS = [(f"Who is {number}?\nAnswer:", answer) for number, answer in enumerate(documents(120))]


def write_pairs(path: Path, *more: object) -> Path:
    records = [*({"question": prompt, "text": answer} for prompt, answer in PAIRS), *more]
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("unit_bytes", [700, 10**9])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompt_and_answer_are_encoded_together_and_recognized(
    tmp_path: Path, kind: str, unit_bytes: int
):
    path = write_pairs(tmp_path / "x.jsonl")
    if kind == "parquet":
        path = tmp_path / "x.parquet"
        questions, answers = zip(*PAIRS, strict=True)
        table = pa.table({"text": answers, "question": questions})
        pq.write_table(table, path, row_group_size=7)
    made = tokenize(tmp_path / "out", path, prompt_key="question", unit_bytes=unit_bytes)
    if unit_bytes == 700:
        assert len(made.shards) > 3
    else:
        assert len(made.shards) == 1

    expected_ids = []
    prompt_tokens = 0
    prompt_bytes = 0
    answer_bytes = 0
    for prompt, answer in PAIRS:
        prompt_ids, answer_ids = pair_ids(prompt, answer)
        expected_ids.append((prompt_ids, answer_ids))
        prompt_tokens += len(prompt_ids)
        prompt_bytes += len(prompt.encode())
        answer_bytes += len(answer.encode())
    assert stored_pairs(tmp_path / "out") == expected_ids
    assert made.prompt_tokens == prompt_tokens
    assert made.prompt_bytes == prompt_bytes
    assert made.bytes == prompt_bytes + answer_bytes

    # The mask of any part of the corpus is that part of the mask of the whole.
    corpus = TokenCorpus(tmp_path / "out")
    whole = corpus.prompt_mask(0, corpus.tokens)
    for start, stop in np.sort(np.random.default_rng(0).integers(0, corpus.tokens, (100, 2))):
        assert start == stop or np.array_equal(corpus.prompt_mask(start, stop), whole[start:stop])


def test_records_without_a_usable_prompt_are_rejected(tmp_path: Path):
    bad = [
        {"text": "an answer"},
        {"text": "an answer", "question": 7},
        {"text": "an answer", "question": " "},
    ]
    path = write_pairs(tmp_path / "x.jsonl", *bad, {"question": "and?"})
    made = tokenize(tmp_path / "out", path, prompt_key="question")
    assert made.rejected == {"no_prompt_key": 1, "no_text_key": 1, "prompt_not_usable": 2}
    assert made.documents == len(PAIRS)
    (tmp_path / "x.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"x\.txt: a line has no 'question'"):
        tokenize(tmp_path / "lines", tmp_path / "x.txt", prompt_key="question")
