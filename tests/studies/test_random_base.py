"""A base with random weights is a Hugging Face folder, with transformers' tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import BaseModelError, ConfigError
from pipeline.files.hashes import file_hash
from pipeline.hf.load import load_hf_model
from studies.harness.random_base import make_random_base
from studies.harness.study import NewTokenizer, RandomBase, TokenizerText
from tests.bases import CONFIGS, STORIES
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

TEXTS = ["Once  upon a time", "마지막 반전은 정말 압권이었다.\nㅋㅋㅋ 😀", "  1984, a\ttab"]


@pytest.fixture
def architecture(tmp_path: Path) -> Path:
    path = tmp_path / "architecture.json"
    path.write_text(json.dumps(CONFIGS["llama tied"].to_dict()))
    return path


def test_a_new_tokenizer_gives_us_and_transformers_the_same_tokens(architecture, tmp_path):
    """The same settings give the same base, another seed another.

    A start token is put before texts.
    """
    parts = [(STORIES_HELDOUT, 0.05), (REVIEWS_HELDOUT, 0.01)]
    texts = [TokenizerText(input=[str(file)], mib=mib) for file, mib in parts]
    wanted = RandomBase(
        architecture=architecture, tokenizer=NewTokenizer(vocab_size=900, texts=texts), seed=1
    )
    starting = NewTokenizer(vocab_size=900, texts=texts, start_token=True)
    for folder, changes in (
        ("first", {}),
        ("same", {}),
        ("other", {"seed": 2, "tokenizer": starting}),
    ):
        make_random_base(wanted.model_copy(update=changes), tmp_path / folder)

    ours, theirs = (
        load_tokenizer(tmp_path / "first"),
        AutoTokenizer.from_pretrained(tmp_path / "first"),
    )
    started = AutoTokenizer.from_pretrained(tmp_path / "other")
    assert ours.vocab_size == load_hf_model(tmp_path / "first").config.vocab_size == 900
    assert load_tokenizer(tmp_path / "other").document_start == (started.bos_token_id,)
    for text in TEXTS:
        ids = ours.reference.encode([text]).ids.tolist()
        assert ids == theirs.encode(text) == started.encode(text)[1:]
        assert ours.fast is None or ids == ours.fast.encode([text]).ids.tolist()
        assert theirs.decode(ids).lstrip() == text.lstrip()
    first, same, other = (
        file_hash(tmp_path / folder / "model.safetensors") for folder in ("first", "same", "other")
    )
    assert first == same != other

    before = (tmp_path / "first" / "config.json").stat().st_mtime_ns
    make_random_base(wanted, tmp_path / "first")
    assert before == (tmp_path / "first" / "config.json").stat().st_mtime_ns
    with pytest.raises(
        ConfigError, match=r"made of another tokenizer and seed than `scratch` has now"
    ):
        make_random_base(
            wanted.model_copy(update={"seed": 9, "tokenizer": STORIES}), tmp_path / "first"
        )


@pytest.mark.parametrize("given", [STORIES, STORIES / "tokenizer.json"], ids=["folder", "file"])
def test_a_given_tokenizer_is_copied(given, architecture, tmp_path):
    make_random_base(RandomBase(architecture=architecture, tokenizer=given), tmp_path / "base")
    assert load_tokenizer(tmp_path / "base").fingerprint == load_tokenizer(STORIES).fingerprint
    model = load_hf_model(tmp_path / "base")
    assert (model.config.vocab_size, model.config.eos_token_id) == (512, 2)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_an_unsupported_architecture_leaves_no_folder(tmp_path):
    architecture = tmp_path / "architecture.json"
    architecture.write_text('{"model_type": "bert"}')
    with pytest.raises(BaseModelError, match="model_type 'bert' is not among"):
        make_random_base(
            RandomBase(architecture=architecture, tokenizer=STORIES), tmp_path / "base"
        )
    assert not (tmp_path / "base").exists()
