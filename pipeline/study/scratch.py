"""A base from nothing: random weights of a given architecture, and a tokenizer, as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaTokenizer
from transformers.utils import logging

from pipeline import log
from pipeline.data.tokenizer import load_tokenizer, tokenizer_file
from pipeline.data.tokenizer_training import texts, train_sentencepiece
from pipeline.errors import ConfigError
from pipeline.files import file_hash, published_folder, write_json
from pipeline.model.from_hf import read_spec
from pipeline.study.description import NewTokenizer, Scratch, TokenizerText

_TOKENIZER_CONFIG = "tokenizer_config.json"
_MADE_OF = "made_of.json"
_logger = log.get_logger(__name__)


def make_scratch(scratch: Scratch, folder: Path) -> None:
    """Makes the base in `folder`; does nothing where it is.

    Raises:
        ConfigError: what is there was made of something else.
        BaseModelError: the architecture is none that can be trained.
        DataError: the tokenizer cannot be read, or not be trained on these texts.
    """
    spec = read_spec(scratch.architecture)
    made_of = _made_of(scratch)
    if folder.exists():
        _check_same(folder, made_of)
        return
    with published_folder(folder) as unfinished:
        if isinstance(scratch.tokenizer, Path):
            _copy_tokenizer(scratch.tokenizer, unfinished)
        else:
            _train_tokenizer(scratch.tokenizer, unfinished)
        _write_weights(scratch, unfinished)
        write_json(unfinished / _MADE_OF, made_of)
    _logger.info("wrote a random base of %d layers to %s", spec.num_layers, folder)


def _made_of(scratch: Scratch) -> dict[str, Any]:
    """What decides the base, however the places of its texts are written."""
    values = scratch.model_dump(mode="json")
    architecture = scratch.architecture / "config.json" if scratch.architecture.is_dir() else scratch.architecture
    values["architecture"] = json.loads(architecture.read_text(encoding="utf-8"))
    if isinstance(scratch.tokenizer, Path):
        values["tokenizer"] = file_hash(tokenizer_file(scratch.tokenizer))
    else:
        for part in values["tokenizer"]["texts"]:
            part["input"] = [str(Path(place).resolve()) for place in part["input"]]
    return values


def _check_same(folder: Path, made_of: Mapping[str, Any]) -> None:
    path = folder / _MADE_OF
    if not path.exists():  # a base that was made before this file was
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if other := [key for key in made_of if found[key] != made_of[key]]:
        raise ConfigError(
            f"{path}: this base was made of another {' and '.join(other)} than scratch says now; remove the study's "
            f"folder {folder.parent}, or give the study another one"
        )


def _write_weights(scratch: Scratch, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    config = AutoConfig.from_pretrained(scratch.architecture, local_files_only=True, trust_remote_code=False)
    config.vocab_size = max(tokenizer.vocab_size, config.vocab_size)
    config.eos_token_id = tokenizer.document_end[-1]
    config.bos_token_id = [*tokenizer.document_start, config.eos_token_id][0]
    torch.manual_seed(scratch.seed)
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _train_tokenizer(wanted: NewTokenizer, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tokenizer.model"
        train_sentencepiece(
            _sample(wanted.texts),
            model,
            vocab_size=wanted.vocab_size,
            model_type="bpe",
            threads=len(os.sched_getaffinity(0)),
        )
        # The two libraries differ where a text begins with spaces: one file decides for us and for transformers.
        LlamaTokenizer.from_pretrained(scratch).backend_tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(folder / _TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def _sample(parts: Iterable[TokenizerText]) -> Iterator[str]:
    return chain.from_iterable(
        texts(part.input, text_key=part.text_key, max_bytes=int(part.mib * 2**20)) for part in parts
    )


def _copy_tokenizer(path: Path, folder: Path) -> None:
    source = tokenizer_file(path)
    tokenizer = load_tokenizer(source)
    shutil.copyfile(source, folder / ("tokenizer.model" if source.suffix == ".model" else "tokenizer.json"))
    if (source.parent / _TOKENIZER_CONFIG).is_file():
        shutil.copyfile(source.parent / _TOKENIZER_CONFIG, folder / _TOKENIZER_CONFIG)
    else:
        end = tokenizer.decode(tokenizer.document_end)
        write_json(folder / _TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})
