"""SentencePiece's own models: their ids are the library's, and so are those of their
tokenizer.json."""

from __future__ import annotations

import io
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.chats import ChatTemplate
from pipeline.data.tokenizer.extension.bpe import read_bpe_tokens
from pipeline.data.tokenizer.extension.vocabulary import learn_extension
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.sentencepiece_model import (
    SentencePieceModel,
    converted,
    read_model,
    train_model,
)
from pipeline.errors import DataError
from tests.data.helpers import documents, stories, tokenize, write_jsonl
from tests.files import change_json
from tests.programs import scale_cpt
from tests.texts import DATA, REVIEWS_HELDOUT, STORIES_HELDOUT

SPM = Path(__file__).parents[1] / "fixtures" / "spm"
"""BPE with byte fallback, as Llama's: its BOS is 1 and its EOS 2, whatever its config.json says."""
SHIPPED = sorted(DATA.glob("*/*.heldout.jsonl.zst"))
ODD = [
    "  two spaces  in front",
    "a\n\nb\tc\r\n",
    "12,345.678",
    "e\u0301 ﬁ ½ Ａ カタカナ ㅇㅣ각",
    "👩‍👩‍👧 \u200b\ufeffx",
    " ",
    "",
]


def ids_of(model: SentencePieceModel, text: str) -> list[int]:
    return list(model.processor.encode(text))


def trained(**settings: Any) -> SentencePieceModel:
    """A model as others train them, of a few real documents."""
    lines = [line for text in stories(40) for line in text.split("\n")]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=2500,
        hard_vocab_limit=False,
        max_sentence_length=100_000,
        minloglevel=2,
        num_threads=1,
        **settings,
    )
    return read_model(Path("trained.model"), written.getvalue())


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_the_ids_of_all_shipped_texts_are_sentencepieces_own(file: Path):
    tokenizer = load_tokenizer(SPM)
    library = sentencepiece.SentencePieceProcessor(model_file=str(SPM / "tokenizer.model"))
    read = list(texts([str(file)]))
    assert len(read) > 50
    ids, lengths = tokenizer.reference.encode(read)
    found = np.split(ids, np.cumsum(lengths)[:-1])
    assert [one.tolist() for one in found] == [library.encode(text) for text in read]


def test_what_stands_before_and_after_a_document(tmp_path: Path):
    """A BOS is not lost: transformers' classes put one there unless the folder says otherwise."""
    folder = shutil.copytree(SPM, tmp_path / "base")
    whole = load_tokenizer(folder)
    assert (whole.document_start, whole.document_end, whole.vocab_size) == ((1,), (2,), 406)
    alone = load_tokenizer(shutil.copyfile(SPM / "tokenizer.model", tmp_path / "x.model"))
    assert (alone.document_start, alone.document_end) == ((1,), (2,))
    assert alone.fingerprint == whole.fingerprint
    change_json(folder / "tokenizer_config.json", add_bos_token=False)
    without = load_tokenizer(folder)
    assert without.document_start == () and without.fingerprint != whole.fingerprint
    assert load_tokenizer(folder, end_of_document="<s>").document_end == (1,)
    assert whole.decode([1, *whole.reference.encode(["a dog"]).ids, 2]) == "<s>a dog</s>"


def test_a_corpus_of_a_lone_model(tmp_path: Path):
    read = [text for text in documents(20) if text.strip()]
    tokenize(
        tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", read), tokenizer=SPM / "tokenizer.model"
    )
    corpus = TokenCorpus(tmp_path / "out")
    assert corpus.manifest.tokenizer.backend == "sentencepiece"
    library = sentencepiece.SentencePieceProcessor(model_file=str(SPM / "tokenizer.model"))
    expected = [token for text in read for token in (1, *library.encode(text), 2)]
    assert corpus.read(0, corpus.tokens).tolist() == expected


_IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe"},
    "llama": {"model_type": "bpe", "byte_fallback": True, **_IDENTITY},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n\n", "▁▁", "<sep>"],
        **_IDENTITY,
    },
    "unigram": {"model_type": "unigram"},
    "unigram bytes": {"model_type": "unigram", "byte_fallback": True, **_IDENTITY},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_has_the_same_ids(kind: str):
    """But where a Unigram model has several best cuts, between which the libraries choose by their
    rounding."""
    model = trained(**KINDS[kind])
    tokenizer = converted(model, (1,))
    read = [*ODD]
    for text in stories(60):
        if not any(token in text for token in model.reserved_tokens):
            read.append(text)
    assert len(read) > 60

    different = []
    for text in read:
        if tokenizer.encode(text).ids != [1, *ids_of(model, text)]:
            different.append(text)
    several_best_cuts = 2 if "unigram" in kind else 0
    assert len(different) <= several_best_cuts
    if kind == "llama":
        for text in read[7:]:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_suffix_decides_what_is_written(tmp_path: Path):
    read = [
        "--input",
        str(REVIEWS_HELDOUT),
        str(STORIES_HELDOUT),
        "--max-mib",
        "0.2",
        "--vocab-size",
        "1500",
    ]
    for name, more in (
        ("bpe.model", []),
        ("bpe.json", []),
        ("unigram.model", ["--model-type", "unigram"]),
    ):
        done = scale_cpt("tokenizer", *read, "--output", tmp_path / name, *more)
        assert done.returncode == 0, done.stderr
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "bpe.model"))
    json_, own = load_tokenizer(tmp_path / "bpe.json"), load_tokenizer(tmp_path / "bpe.model")
    for text in islice(texts([str(REVIEWS_HELDOUT)]), 50):
        expected = library.encode(text)
        assert (
            own.reference.encode([text]).ids.tolist()
            == json_.reference.encode([text]).ids.tolist()
            == expected
        )
    kinds = [
        read_model(path, path.read_bytes()).description.trainer_spec.model_type
        for path in (tmp_path / "bpe.model", tmp_path / "unigram.model")
    ]
    assert kinds == [2, 1]
    done = scale_cpt("tokenizer", *read, "--output", tmp_path / "x.bin")
    assert done.returncode == 2 and "expected a name in .model" in done.stderr


def test_a_model_is_converted_and_its_ids_are_compared(tmp_path: Path):
    folder = shutil.copytree(SPM, tmp_path / "base")
    done = scale_cpt(
        "tokenizer",
        *("--convert", folder / "tokenizer.model", "--output", folder / "tokenizer.json"),
        *("--report-on", f"korean={REVIEWS_HELDOUT}", f"english={STORIES_HELDOUT}"),
    )
    assert done.returncode == 0, done.stderr
    assert "korean: 150 of 150 texts have the ids of" in done.stdout
    # These stories spell <s>, which is a control token in a tokenizer.json and plain text for
    # SentencePiece.
    assert "english: 292 of 292" not in done.stdout and "differ" in done.stdout
    assert load_tokenizer(folder).document_start == (1,)
    assert load_tokenizer(folder).path.name == "tokenizer.json"


@pytest.mark.parametrize(
    "needs_json", [ChatTemplate, lambda path: learn_extension(path, [], [], add=1, min_uses=1)]
)
def test_what_needs_a_tokenizer_json_says_how_to_write_one(needs_json):
    with pytest.raises(
        DataError,
        match=r"scale-cpt tokenizer --convert .*tokenizer\.model --output .*tokenizer\.json",
    ):
        needs_json(SPM)


def test_a_unigram_tokenizer_cannot_be_extended(tmp_path: Path):
    content = train_model(iter(documents(200)), 305, model_type="unigram", character_coverage=1.0)
    path = tmp_path / "tokenizer.json"
    path.write_text(converted(read_model(tmp_path / "x.model", content)).to_str())
    assert json.loads(path.read_text())["model"]["type"] == "Unigram"
    with pytest.raises(
        DataError, match=r"a Unigram tokenizer.* train on it as it is, without `vocabulary`"
    ):
        read_bpe_tokens(path)
