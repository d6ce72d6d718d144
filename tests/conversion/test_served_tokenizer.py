"""Whoever loads an export by AutoTokenizer has the ids of training; where a base's own differ, that
is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConversionError
from pipeline.evaluation.perplexity import score_folder
from pipeline.extensions.tasks.benchmarks import benchmark_model
from pipeline.hf.served_tokenizer import (
    check_export,
    check_future_export,
    first_difference,
    texts_of,
    tokenizer_as_trained,
    warn_of_base,
    write_exported_tokenizer,
)
from tests.bases import STORIES, save_base
from tests.conversion.checkpoints import checkpoint_in, save, scale, without_this_project
from tests.distributed import run_ranks
from tests.extensions.self_generated.helpers import copied_stories
from tests.files import change_json
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

HERE = Path(__file__).parent
SPM = HERE.parent / "data" / "fixtures" / "spm"
FILES = {name: HERE / "tokenizers" / f"{name}.json" for name in ("byte_level", "metaspace")}
_GPT2 = {
    "tokenizer_class": "GPT2Tokenizer",
    "eos_token": "<|endoftext|>",
    "bos_token": "<|endoftext|>",
}
_LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "extra_special_tokens": ["<s>", "</s>"],
    "add_bos_token": True,
}
# The file of a base, its settings, the type of its model, and whether its own AutoTokenizer has
# other ids.
BASES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "OLMo 2": ("byte_level", _GPT2, "olmo2", False),
    "Phi-4": ("byte_level", _GPT2, "phi3", False),
    "GPT2Tokenizer on llama": ("byte_level", _GPT2, "llama", True),
    "GPT2Tokenizer on exaone4": ("byte_level", _GPT2, "exaone4", True),
    "add_prefix_space": ("byte_level", {**_GPT2, "add_prefix_space": True}, "gpt_neox", True),
    "Mistral": ("metaspace", {**_LLAMA, "legacy": True}, "mistral", False),
    "Phi-3": ("metaspace", {**_LLAMA, "legacy": False}, "phi3", False),
    "LlamaTokenizer on llama": ("metaspace", {**_LLAMA, "legacy": False}, "llama", True),
    "no settings": ("metaspace", {}, "gemma", True),
}
TEXTS = [
    "In 1984 there were 12345 dogs.",
    "  two  spaces\n\n\nand lines",
    "한국어 문장 2024년",
    "a<s>b</s> <|endoftext|>c",
]


def base_in(folder: Path, file: str, settings: dict[str, Any], model_type: str) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copyfile(FILES[file], folder / "tokenizer.json")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(
            json.dumps({"model_type": model_type, "eos_token_id": 1})
        )
    return folder


def ids_of_file(folder: Path) -> list[list[int]]:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [library.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("name", BASES)
def test_an_exports_autotokenizer_reads_the_file_as_it_is(name: str, tmp_path: Path, caplog):
    *of_base, differs = BASES[name]
    base = base_in(tmp_path / "base", *of_base)
    trained = load_tokenizer(base)
    for model_type in ("scale", of_base[-1]):
        exported = tmp_path / model_type
        exported.mkdir()
        write_exported_tokenizer(exported, base, model_type)
        served = AutoTokenizer.from_pretrained(exported)
        assert served(TEXTS)["input_ids"] == ids_of_file(base)
        check_export(exported, trained, TEXTS)
    check_future_export(base, trained, "scale", TEXTS)
    warning = warn_of_base(base, trained, TEXTS)
    assert (warning is not None) == differs
    if differs:
        assert str(base) in caplog.text and "AutoTokenizer has other ids than" in caplog.text
        assert " is [" in warning and "in training, [" in warning and "\n" not in warning


def test_another_class_in_an_export_is_refused(tmp_path: Path):
    """As every export had it: the base's class, with a type of model for which nothing repairs it."""
    exported = base_in(tmp_path / "hf", "byte_level", _GPT2, "scale")
    with pytest.raises(
        ConversionError, match=r"hf: its ids are not those of training: .* is \[.*in training"
    ):
        check_export(exported, load_tokenizer(exported))


@pytest.mark.parametrize("text", ["7654321", "\n\n\n\n", "x      y"])
def test_a_difference_in_a_document_is_shown_in_a_short_text(text: str, tmp_path: Path):
    """Which no fixed text foresees."""
    trained = load_tokenizer(base_in(tmp_path / "trained", "byte_level", _GPT2, "olmo2"))
    served = base_in(tmp_path / "served", "byte_level", _GPT2, "olmo2")
    change_json(
        served / "tokenizer.json",
        normalizer={"type": "Replace", "pattern": {"String": text}, "content": "?"},
    )
    assert first_difference(served, trained) is None
    found = first_difference(served, trained, ["word " * 400 + text + " word" * 400])
    assert found is not None and text in found.text and len(found.text) <= 24


def test_dropout_of_merges_makes_no_other_tokenizer(tmp_path: Path):
    """It is off in training and in exports; as the file stands it would draw other ids each time."""
    model = json.loads((STORIES / "tokenizer.json").read_text())["model"]
    base = copied_stories(tmp_path / "base", tokenizer={"model": model | {"dropout": 0.5}})
    check_future_export(
        base, load_tokenizer(base), "scale", ["Once upon a time there was a little dog"] * 20
    )


def test_a_special_token_that_the_file_lacks_is_found(tmp_path: Path):
    """transformers would give it an id of which the model has no row."""
    base = base_in(tmp_path / "base", "byte_level", {**_GPT2, "pad_token": "[PAD]"}, "olmo2")
    with pytest.raises(
        ConversionError, match=r"\[PAD\].*must name only tokens that tokenizer\.json has"
    ):
        check_future_export(base, load_tokenizer(base), "scale")


@pytest.fixture(scope="module")
def olmo2(tmp_path_factory) -> tuple[Path, Path]:
    """A base and the checkpoint of a run on it."""
    folder = tmp_path_factory.mktemp("olmo2")
    base = base_in(
        save_base("olmo2", folder / "base", vocab_size=600, eos_token_id=1), "byte_level", _GPT2, ""
    )
    run_ranks(save, 1, base, scale("adapt"), folder / "run")
    return base, checkpoint_in(folder / "run")


def test_the_export_of_an_olmo_2(olmo2, tmp_path: Path):
    """In a process without this project, as users load it; evaluation takes the same ids."""
    base, checkpoint = olmo2
    exported = tmp_path / "hf"
    sources = {path.name: [str(path)] for path in (STORIES_HELDOUT, REVIEWS_HELDOUT)}
    texts = list(texts_of(sources))
    assert len(texts) > 200
    assert convert(Conversion(checkpoint, base, exported), probe_maker({}), texts)
    program = f"""
import sys
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)({TEXTS!r})["input_ids"])
"""
    done = without_this_project(program, exported, tmp_path)
    assert json.loads(done.stdout) == ids_of_file(base)
    score_folder(exported, {"texts": TEXTS}, context=16)
    change_json(exported / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    with pytest.raises(
        ConversionError, match=r"its ids are not those of training: .*; convert the run again"
    ):
        score_folder(exported, {"texts": TEXTS}, context=16)


def test_an_export_with_other_ids_is_not_kept(olmo2, tmp_path: Path):
    _, checkpoint = olmo2
    base = shutil.copytree(olmo2[0], tmp_path / "base")
    change_json(base / "tokenizer_config.json", pad_token="[PAD]")
    with pytest.raises(ConversionError, match=r"\[PAD\].*not kept"):
        convert(Conversion(checkpoint, base, tmp_path / "hf"), probe_maker({}))
    assert not (tmp_path / "hf").exists()


def test_benchmarks_take_the_ids_of_the_file(tmp_path: Path, caplog):
    """Of a base whose class has others, which is said."""
    base = copied_stories(tmp_path / "base", tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    model = benchmark_model(base)
    expected = load_tokenizer(base).reference.encode(["Once 1234  upon"]).ids.tolist()
    assert model.tok_encode("Once 1234  upon", add_special_tokens=False) == expected
    assert "AutoTokenizer has other ids than" in caplog.text
    caplog.clear()
    score_folder(base, {"texts": ["Once upon a time there was a dog."]}, context=16)
    assert "AutoTokenizer has other ids than" in caplog.text


def test_a_lone_model_is_converted_for_an_export(tmp_path: Path):
    exported = tmp_path / "hf"
    exported.mkdir()
    trained = load_tokenizer(SPM)
    write_exported_tokenizer(exported, SPM, "scale")
    check_export(exported, trained, TEXTS[:3])
    served = AutoTokenizer.from_pretrained(exported)
    assert served(TEXTS[0])["input_ids"] == [1, *trained.reference.encode(TEXTS[:1]).ids.tolist()]
    assert (served.bos_token, served.eos_token) == ("<s>", "</s>")
    assert (
        tokenizer_as_trained(SPM, trained)(TEXTS[1])["input_ids"] == served(TEXTS[1])["input_ids"]
    )
    described = json.loads((exported / "tokenizer.json").read_text())
    described["model"]["merges"] = described["model"]["merges"][:20]
    (exported / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ConversionError, match=r"no tokenizer\.json with the same ids: write one"):
        check_export(exported, trained, TEXTS[:3])
