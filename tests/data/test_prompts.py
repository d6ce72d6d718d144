"""Answers to prompts: what is stored, that prompts are recognized, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data import jobs
from pipeline.data.token_corpus import TokenCorpus, load_manifest
from pipeline.data.token_shards import Shard, prompts_file
from pipeline.data.unit_work import is_heldout
from pipeline.errors import DataError
from tests.data.helpers import contents, documents, forget_hashes, stories_tokenizer, tokenize

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


def test_the_shards_stay_in_megatrons_format(tmp_path: Path):
    tokenize(tmp_path / "out", write_pairs(tmp_path / "x.jsonl"), prompt_key="question")
    shard = Shard(tmp_path / "out" / "00000-000000")
    assert [list(shard.document(number)) for number in range(3)] == [
        [*prompt, *answer] for prompt, answer in (expected(*pair) for pair in PAIRS[:3])
    ]


def test_held_out_by_prompt_and_answer(tmp_path: Path):
    same_answer = [(prompt, "yes") for prompt, _ in PAIRS]
    path = write_pairs(tmp_path / "x.jsonl", same_answer)
    tokenize(tmp_path / "out", path, prompt_key="question", heldout_fraction=0.3)
    heldout = load_manifest(tmp_path / "out.heldout")
    assert heldout.documents == sum(is_heldout(prompt + answer, 0.3) for prompt, answer in same_answer)
    assert 0 < heldout.documents < len(PAIRS)
    assert heldout.prompt_key == "question"
    assert stored(tmp_path / "out.heldout")[0] in [expected(*pair) for pair in same_answer]


def test_an_interrupted_job_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_pairs(tmp_path / "x.jsonl")
    settings = {"prompt_key": "question", "unit_bytes": 700, "heldout_fraction": 0.2}
    tokenize(tmp_path / "a" / "out", path, **settings)
    write, written = jobs.write_record, []

    def interrupted(target: Path, value: object) -> None:
        written.extend([target] * isinstance(value, jobs.UnitRecord))
        if isinstance(value, jobs.UnitRecord) and len(written) in (
            3,
            4,
            8,
        ):  # prompts and index of this unit are there, its record is not
            raise KeyboardInterrupt
        write(target, value)

    monkeypatch.setattr(jobs, "write_record", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tokenize(tmp_path / "b" / "out", path, **settings)
    tokenize(tmp_path / "b" / "out", path, **settings)
    folders = [[tmp_path / run / name for name in ("out", "out.heldout")] for run in "ab"]
    assert contents(*folders[0]) == contents(*folders[1])
    assert sum(name.endswith(".prompts.npy") for name in contents(*folders[0])) > 6


def test_records_without_a_usable_prompt_are_rejected(tmp_path: Path):
    bad = [{"text": "an answer"}, {"text": "an answer", "question": 7}, {"text": "an answer", "question": " "}]
    path = write_pairs(tmp_path / "x.jsonl", PAIRS, *bad, {"question": "and?"})
    made = tokenize(tmp_path / "out", path, prompt_key="question")
    assert made.rejected == {"no_prompt_key": 1, "no_text_key": 1, "prompt_not_usable": 2}
    assert made.documents == len(PAIRS)


def test_lines_of_text_have_no_prompts(tmp_path: Path):
    (tmp_path / "x.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"x\.txt: a line of text has no 'question'"):
        tokenize(tmp_path / "out", tmp_path / "x.txt", prompt_key="question")


def test_a_column_that_is_missing_is_named(tmp_path: Path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="has no column 'question'; set --prompt-key to one of: text"):
        tokenize(tmp_path / "out", tmp_path / "x.parquet", prompt_key="question")


def test_a_corpus_without_its_prompts_is_refused(tmp_path: Path):
    path = write_pairs(tmp_path / "x.jsonl")
    tokenize(tmp_path / "out", path, prompt_key="question")
    forget_hashes(tmp_path / "out")
    lengths_file = prompts_file(tmp_path / "out" / "00000-000000")
    whole = np.load(lengths_file)
    TokenCorpus(tmp_path / "out").check()
    for change, message in (
        (lambda: np.save(lengths_file, whole[:-1]), "expected 120 lengths of int32, found .119,. of int32"),
        (lambda: np.save(lengths_file, whole.astype(np.int64)), "expected 120 lengths of int32, found .120,. of int64"),
        (lambda: np.save(lengths_file, whole + 1000), "damaged: a prompt is longer than its document"),
        (lambda: np.save(lengths_file, -whole), "damaged: a prompt is longer than its document"),
        (lambda: lengths_file.write_bytes(b"no array"), "not an array in NumPy's format"),
        (lambda: lengths_file.write_bytes(b"PK\x03\x04" + bytes(100)), "not an array in NumPy's format"),
        (lengths_file.unlink, "no such file"),
    ):
        change()
        with pytest.raises(DataError, match=rf"prompts\.npy: {message}"):
            TokenCorpus(tmp_path / "out").check()


def test_another_prompt_key_is_another_corpus(tmp_path: Path):
    path = write_pairs(tmp_path / "x.jsonl")
    tokenize(tmp_path / "out", path)
    with pytest.raises(DataError, match="was begun with another prompt key: expected 'question', found None"):
        tokenize(tmp_path / "out", path, prompt_key="question")
