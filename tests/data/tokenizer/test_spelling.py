"""Text that names special tokens stays text, and what a tokenizer cannot spell is counted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.errors import DataError
from tests.data.helpers import (
    CASES,
    texts_in,
    texts_of,
    tokenize,
    write_jsonl,
)
from tests.texts import DATA


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "foreign_eos",
            r"config\.json: eos_token_id: expected an id of the tokenizer, below 600, found 128001",
        ),
        (
            "missing_eos",
            r"tokenizer_config\.json: eos_token: expected a token of the tokenizer, found '<\|im_end\|>'",
        ),
        (
            "no_unk",
            r"characters become nothing, more than max_unknown_fraction 0\.01 allows; take a tokenizer that has",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, name: str, said: str):
    texts = write_jsonl(tmp_path / "x.jsonl", ["가격은 twenty 원입니다 and more"] * 40)
    with pytest.raises(DataError, match=said):
        tokenize(tmp_path / "out", texts, tokenizer=CASES / "tokenizers" / name)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_what_cannot_be_spelled_is_counted_and_may_be_allowed(tmp_path: Path):
    texts = write_jsonl(tmp_path / "x.jsonl", ["ab 가격 가", "ab"])
    settings = {"tokenizer": CASES / "tokenizers" / "no_unk", "max_unknown_fraction": 0.5}
    made = tokenize(tmp_path / "out", texts, **settings)
    assert (made.characters, made.lost_characters) == (9, 3)
    described = json.loads((CASES / "tokenizers" / "no_unk" / "tokenizer.json").read_text())
    described["model"]["unk_token"] = "</s>"
    shutil.copytree(CASES / "tokenizers" / "no_unk", tmp_path / "unk")
    (tmp_path / "unk" / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="tokens are unknown, more than max_unknown_fraction"):
        tokenize(tmp_path / "other", texts, tokenizer=tmp_path / "unk")


def test_a_tokenizer_of_bytes_spells_everything_and_one_of_letters_what_it_has(tmp_path: Path):
    """Also letters that join with those before them to one token, as `an` does."""
    source = write_jsonl(tmp_path / "x.jsonl", ["ab an banana, 한국어 문장 👩‍👩‍👧 \u200b é"])
    settings = {"tokenizer": DATA / "tokenizers" / "20B_tokenizer.json"}
    assert tokenize(tmp_path / "bytes", source, **settings).unknown_fraction == 0

    # Without one of the bytes that Hangul has, it is a tokenizer of the letters that are left.
    missing_byte = "Ń"
    described = json.loads((DATA / "tokenizers" / "20B_tokenizer.json").read_text())
    vocabulary = {}
    for token, token_id in described["model"]["vocab"].items():
        if missing_byte not in token:
            vocabulary[token] = token_id
    merges = []
    for merge in described["model"]["merges"]:
        # Files of tokenizers before 0.20 have a merge as one string.
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if missing_byte not in "".join(pair):
            merges.append(pair)
    described["model"]["vocab"] = vocabulary
    described["model"]["merges"] = merges
    letters = tmp_path / "tokenizer.json"
    letters.write_text(json.dumps(described))
    plain = write_jsonl(tmp_path / "y.jsonl", ["ab an banana", "and an apple"])
    assert tokenize(tmp_path / "letters", plain, tokenizer=letters).lost_characters == 0


@pytest.mark.parametrize("name", ["bos", "strike"])
def test_text_that_spells_special_tokens_stays_text_and_is_counted(tmp_path: Path, name: str):
    source = CASES / "09_special" / f"{name}.jsonl"
    texts = texts_of(source)
    spelled = sum(text.count("<s>") + text.count("</s>") for text in texts)
    made = tokenize(tmp_path / "text", source)
    assert (made.special_tokens, made.special_tokens_spelled) == ("text", spelled)
    corpus = TokenCorpus(tmp_path / "text")
    ids = corpus.read(0, corpus.tokens).tolist()
    assert (ids.count(1), ids.count(2)) == (20, 20)  # those around the documents alone
    assert texts_in(tmp_path / "text") == texts
    control = tokenize(tmp_path / "control", source, special_tokens="control")
    assert (control.special_tokens, control.special_tokens_spelled) == ("control", spelled)
    assert control.tokens < made.tokens
