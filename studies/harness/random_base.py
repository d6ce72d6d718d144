"""A base with random weights: architecture and tokenizer, as an ordinary Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from pipeline import log
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.sentencepiece_model import (
    ModelType,
    SentencePieceModel,
    converted,
    read_model,
    train_model,
)
from pipeline.data.tokenizer.tokenizer_file import TOKENIZER_FILE, json_file
from pipeline.errors import ConfigError
from pipeline.files.folders import published_folder
from pipeline.files.json_files import read_object, write_json
from pipeline.model.from_hf import read_spec
from studies.harness.study import NewTokenizer, RandomBase

_TOKENIZER_CONFIG = "tokenizer_config.json"
_SENTENCEPIECE_FILE = "tokenizer.model"
_MADE_OF = "made_of.json"
_logger = log.get_logger(__name__)


def make_random_base(wanted: RandomBase, folder: Path) -> None:
    """Writes the base into `folder`, unless it exists.

    Raises:
        OutputError, ConfigError: the folder holds something else, or a base made of something else.
        BaseModelError: the architecture is not supported.
        DataError: the tokenizer cannot be read, or cannot be trained on these texts.
    """
    spec = read_spec(wanted.architecture)
    made_of = wanted.model_dump(mode="json")
    path = folder / _MADE_OF
    if path.exists():
        found = read_object(path, ConfigError)
        changed = [key for key in made_of if found.get(key) != made_of[key]]
        if changed:
            raise ConfigError(
                f"{path}: this base was made of another {' and '.join(changed)} than `scratch` has "
                f"now; remove the study's folder {folder.parent}, or give the study another one"
            )
        return
    with published_folder(folder, None) as unfinished:
        if isinstance(wanted.tokenizer, Path):
            _copy_tokenizer(wanted.tokenizer, unfinished)
        else:
            _train_tokenizer(wanted.tokenizer, unfinished)
        tokenizer = load_tokenizer(unfinished)
        config = AutoConfig.from_pretrained(
            wanted.architecture, local_files_only=True, trust_remote_code=False
        )
        # A larger one of the architecture stays: bases often have rows without tokens.
        config.vocab_size = max(tokenizer.vocab_size, config.vocab_size)
        config.eos_token_id = tokenizer.document_end[-1]
        # A tokenizer without a start token begins documents with the token that ends them.
        config.bos_token_id = [*tokenizer.document_start, config.eos_token_id][0]
        torch.manual_seed(wanted.seed)
        # A study's log has lines of its own.
        logging.disable_progress_bar()
        # In fp32, in which the stages of a small base train.
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(unfinished)
        write_json(unfinished / _MADE_OF, made_of)
    _logger.info("wrote a base of %d layers with random weights to %s", spec.num_layers, folder)


def _copy_tokenizer(path: Path, folder: Path) -> None:
    source = json_file(path)
    tokenizer = load_tokenizer(source)
    shutil.copyfile(source, folder / TOKENIZER_FILE)
    if (source.parent / _TOKENIZER_CONFIG).is_file():
        shutil.copyfile(source.parent / _TOKENIZER_CONFIG, folder / _TOKENIZER_CONFIG)
    else:
        _write_tokenizer_config(folder, eos_token=tokenizer.decode(tokenizer.document_end))


def _train_tokenizer(wanted: NewTokenizer, folder: Path) -> None:
    documents: list[Iterator[str]] = []
    for part in wanted.texts:
        max_bytes = int(part.mib * 2**20)
        documents.append(texts(part.input, text_key=part.text_key, max_bytes=max_bytes))
    model = _train_model(chain.from_iterable(documents), wanted.vocab_size)
    # llama.cpp takes the order of merges from SentencePiece's own file.
    (folder / _SENTENCEPIECE_FILE).write_bytes(model.content)
    tokenizer = converted(model)
    if wanted.start_token:
        start = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[start]
        )
    tokenizer.save(str(folder / TOKENIZER_FILE))
    _write_tokenizer_config(folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _write_tokenizer_config(folder: Path, **special: str) -> None:
    write_json(
        folder / _TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    )


def train_tokenizer(
    documents: Iterator[str],
    vocab_size: int,
    *,
    character_coverage: float = 0.9999,
    model_type: ModelType = "bpe",
) -> Tokenizer:
    """A tokenizer like Llama's, with byte fallback, which SentencePiece learns from documents.

    Raises:
        DataError: there is too little text, or it is too uniform, for this vocabulary size.
    """
    return converted(_train_model(documents, vocab_size, character_coverage, model_type))


def _train_model(
    documents: Iterator[str],
    vocab_size: int,
    character_coverage: float = 0.9999,
    model_type: ModelType = "bpe",
) -> SentencePieceModel:
    content = train_model(
        documents, vocab_size, model_type=model_type, character_coverage=character_coverage
    )
    return read_model(Path(_SENTENCEPIECE_FILE), content)
