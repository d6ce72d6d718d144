"""Tokenizers are found and read, and both encoders produce the ids of the reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer import encoders
from pipeline.data.tokenizer.encoders import Encoder, agree
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import DataError
from studies.harness.random_base import train_tokenizer
from tests.data.helpers import CASES, STORIES260K, documents, tokenize


def word_level(folder: Path, vocabulary: dict[str, int]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids_of(encoder: Encoder, texts: list[str]) -> list[list[int]]:
    ids, lengths = encoder.encode(texts)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def test_ids_are_those_of_transformers():
    ours, made_up = load_tokenizer(STORIES260K), documents(50)
    expected = transformers.AutoTokenizer.from_pretrained(STORIES260K)(
        made_up, add_special_tokens=False
    )["input_ids"]
    assert ours.fast is not None
    assert ids_of(ours.reference, made_up) == ids_of(ours.fast, made_up) == expected
    assert (ours.vocab_size, ours.document_start, ours.document_end) == (512, (1,), (2,))


def test_the_end_of_document_can_be_named_or_is_the_post_processors(tmp_path: Path):
    folder = word_level(tmp_path / "t", {"a": 0, "[END]": 1, "[B]": 2, "[E]": 3})
    with pytest.raises(DataError, match="--end-of-document"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, end_of_document="[END]").document_end == (1,)
    with pytest.raises(DataError, match=r"no token '\[STOP\]'"):
        load_tokenizer(folder, end_of_document="[STOP]")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    assert load_tokenizer(folder).document_end == (1,)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    framed = {"single": "[B] $A [E]", "special_tokens": [("[B]", 2), ("[E]", 3)]}
    tokenizer.post_processor = processors.TemplateProcessing(**framed)
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder)
    assert (loaded.document_start, loaded.document_end) == ((2,), (3,))


def test_dropout_of_merges_is_off_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    described = json.loads((STORIES260K / "tokenizer.json").read_text())
    described["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    text = "Once upon a time there was a little dog. "
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len({tuple(library.encode(text).ids) for _ in range(20)}) > 1, "or nothing is tried"
    loaded, original = load_tokenizer(tmp_path, end_of_document="</s>"), load_tokenizer(STORIES260K)
    assert (
        f"{tmp_path}/tokenizer.json: its BPE dropout of 0.5, which makes other tokens"
        in caplog.text
    )
    assert ids_of(loaded.reference, [text] * 20) == ids_of(original.reference, [text] * 20)
    assert loaded.fast is not None and agree(loaded.fast, original.reference, [text] * 20)
    assert loaded.fingerprint == original.fingerprint, "their ids are equal"


def test_the_fingerprint_follows_the_ids_and_nothing_else(tmp_path: Path):
    original = load_tokenizer(STORIES260K).fingerprint
    described = json.loads((STORIES260K / "tokenizer.json").read_text())

    def fingerprint_of(changed: dict) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        return load_tokenizer(tmp_path, end_of_document="</s>").fingerprint

    respelled = {
        **described,
        "truncation": {
            "max_length": 5,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        },
    }
    merges = [
        merge.split(" ") if isinstance(merge, str) else merge
        for merge in described["model"]["merges"]
    ]
    respelled["model"] = {**described["model"], "merges": merges}
    assert fingerprint_of(respelled) == original
    ours, whole = load_tokenizer(tmp_path, end_of_document="</s>"), load_tokenizer(STORIES260K)
    assert agree(ours.reference, whole.reference, documents(20)), (
        "the truncation does not cut documents"
    )
    other = {**described, "model": {**described["model"], "merges": merges[:-1]}}
    assert fingerprint_of(other) != original


def test_what_gigatoken_does_not_support_is_encoded_by_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    encoders._say_once.cache_clear()
    with caplog.at_level("INFO", logger="pipeline"):
        for number in range(3):  # as a command does that opens its tokenizer in several places
            path = word_level(tmp_path / f"t{number}", {"a": 0, "</s>": 1})
            assert load_tokenizer(path).fast is None
    assert [record.getMessage() for record in caplog.records] == [
        "gigatoken, the fast encoder, does not support this tokenizer: tokenizers encodes, which "
        "is slower"
    ]


SINGLE_WORD = CASES / "31_single_word_token" / "tokenizer"


def test_a_token_that_matches_whole_words_is_encoded_as_by_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """gigatoken does not know `single_word`."""
    encoders._say_once.cache_clear()
    with caplog.at_level("INFO", logger="pipeline"):
        tokenizer = load_tokenizer(SINGLE_WORD)
    assert tokenizer.fast is None
    assert "gigatoken, the fast encoder, has other ids on 'x영화x" in caplog.text
    inputs = CASES / "31_single_word_token" / "x.jsonl"
    tokenize(tmp_path / "out", inputs, tokenizer=SINGLE_WORD)
    corpus = TokenCorpus(tmp_path / "out")
    library = Tokenizer.from_file(str(SINGLE_WORD / "tokenizer.json"))
    expected: list[int] = []
    for text in texts([str(inputs)]):
        expected += [*library.encode(text).ids, *tokenizer.document_end]
    assert corpus.read(0, corpus.tokens).tolist() == expected
    assert any("영화는" in text for text in texts([str(inputs)])), "or nothing is tried"

    described = json.loads((SINGLE_WORD / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token["single_word"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert load_tokenizer(tmp_path).fast is not None


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "normalized", "special"])
def test_the_fast_encoder_knows_the_other_flags_of_added_tokens(tmp_path: Path, flag: str):
    described = json.loads((SINGLE_WORD / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token.update({"single_word": False, flag: True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = load_tokenizer(tmp_path, end_of_document="<|endoftext|>")
    assert tokenizer.fast is not None
    assert agree(tokenizer.fast, tokenizer.reference, ["영화는 \n 영화  좋다 x영화"])


def test_too_large_or_too_small_a_vocabulary_gives_a_one_line_error():
    with pytest.raises(DataError, match="cannot train 30000 tokens"):
        train_tokenizer(iter(documents(20)), 30_000)
    text = ("".join(chr(0xAC00 + at) for at in range(2000)) for _ in range(20))
    with pytest.raises(DataError, match="--character-coverage"):
        train_tokenizer(text, 600)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no such tokenizer"),
        ("tokenizer.json", b"{", "not JSON"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "cannot read this tokenizer.json"),
        (
            "x.model",
            b"nonsense",
            "expected a model of SentencePiece, which its library cannot read",
        ),
        ("", None, "no such tokenizer"),
    ],
)
def test_a_missing_or_damaged_tokenizer_gives_a_one_line_error(
    tmp_path: Path, name: str, content, message: str
):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
