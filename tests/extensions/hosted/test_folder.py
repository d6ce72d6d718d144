"""The weights of a hosted base's folder: what config.json ties is what the files hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checks.input_checks import check_base
from pipeline.checks.inputs import RunInputs
from pipeline.config.run import load_config
from pipeline.errors import BaseModelError
from pipeline.extensions.hosted.folder import HostedFolder
from pipeline.extensions.hosted.tied_weights import check_loaded_ties, stored_ties
from pipeline.extensions.hosted.transformers_model import load_whole_base
from pipeline.model.base_folder import INDEX_FILE, SINGLE_FILE
from pipeline.model.bases import open_base
from tests.bases import copy_tokenizer, random_model
from tests.extensions.hosted.bases import by_transformers, hosted, hosted_config, save_hosted
from tests.files import change_json
from tests.training.runs import write_config
from tests.widened import some_tokens

# The output map has several names, and a picture model stores tensors under other names than it
# has.
TYPES = ["llama", "gemma2", "gpt2", "mamba", "gemma3"]


@pytest.fixture(scope="module", params=TYPES)
def untied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose output map is a matrix of its own, in its file and by its config.json."""
    folder = tmp_path_factory.mktemp(request.param) / "base"
    config = hosted_config(request.param)
    config.tie_word_embeddings = False
    random_model(config).save_pretrained(folder)
    return copy_tokenizer(folder)


def copy_of(base: Path, folder: Path, *, tied: bool) -> HostedFolder:
    """A copy of a base, with that entry in its config.json."""
    shutil.copytree(base, folder)
    change_json(folder / "config.json", tie_word_embeddings=tied)
    opened = open_base(folder, "transformers")
    assert isinstance(opened, HostedFolder)
    return opened


def test_tied_matrices_that_differ_are_refused(untied, tmp_path):
    base = copy_of(untied, tmp_path / "tied", tied=True)
    message = r"config.json ties \S+ and \S+, but the files .* set tie_word_embeddings to false"
    for refuses in (base.check_tie, lambda: base.whole(torch.float32)):
        with pytest.raises(BaseModelError, match=message):
            refuses()
    # A dry run and a start find it too, before anything is computed.
    config = load_config(write_config(tmp_path, tmp_path, base=str(base.path)))
    config = config.model_copy(update={"base_code": "transformers"})
    with pytest.raises(BaseModelError, match=message):
        check_base(RunInputs(config, 1))


@torch.no_grad()
def test_the_remedy_of_the_refusal_gives_what_transformers_loads(untied, tmp_path):
    by_library = by_transformers(copy_of(untied, tmp_path / "tied", tied=True))
    base = copy_of(untied, tmp_path / "untied", tied=False)
    base.check_tie()
    tokens = some_tokens(base.spec, 2, 20)
    logits = hosted(base).logits(tokens)
    assert torch.allclose(logits, by_library(tokens).logits, atol=1e-5)


def test_tied_matrices_that_are_equal_are_one(untied, tmp_path):
    base = copy_of(untied, tmp_path / "tied", tied=True)
    ((first, second),) = stored_ties(base.spec, base.file_of)
    tensors = load_file(base.path / SINGLE_FILE)
    tensors[second] = tensors[first].clone()
    save_file(tensors, base.path / SINGLE_FILE, {"format": "pt"})
    base.whole(torch.float32)

    del tensors[second]
    save_file(tensors, base.path / SINGLE_FILE, {"format": "pt"})
    alone = open_base(base.path, "transformers")
    assert isinstance(alone, HostedFolder)
    assert stored_ties(alone.spec, alone.file_of) == []
    alone.whole(torch.float32)


def test_the_loaded_model_is_asked_too(untied, tmp_path):
    """For tensors whose names our reading of the files would not know."""
    base = copy_of(untied, tmp_path / "tied", tied=True)
    loaded = load_whole_base(base.path, base.spec, torch.float32)
    with pytest.raises(BaseModelError, match="set tie_word_embeddings to false"):
        check_loaded_ties(loaded, base.path)


def test_tied_matrices_in_two_files_are_compared(tmp_path):
    whole = save_hosted("gpt2", tmp_path / "whole")
    tensors = load_file(whole / SINGLE_FILE)
    base = tmp_path / "sharded"
    shutil.copytree(whole, base)
    (base / SINGLE_FILE).unlink()
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    parts = {"a.safetensors": tensors, "b.safetensors": head}
    names = {name: file for file, part in parts.items() for name in part}
    for file, part in parts.items():
        save_file(part, base / file, {"format": "pt"})
    (base / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    change_json(base / "config.json", tie_word_embeddings=True)
    with pytest.raises(BaseModelError, match=r"safetensors: config.json ties lm_head.weight and"):
        open_base(base, "transformers").check_tie()
