"""A base with random weights: an architecture and a tokenizer, as an ordinary Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import sentencepiece
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, LlamaTokenizer
from transformers.utils import logging

from pipeline import log
from pipeline.data.tokenizer import load_tokenizer, tokenizer_file
from pipeline.data.units import texts
from pipeline.errors import ConfigError, DataError
from pipeline.files import published_folder, read_object, write_json
from pipeline.model.from_hf import read_spec
from pipeline.studies.study import NewTokenizer, RandomBase

_TOKENIZER_CONFIG = "tokenizer_config.json"
_MADE_OF = "made_of.json"
_MAX_SENTENCE_BYTES = 16_384  # SentencePiece drops longer ones
_logger = log.get_logger(__name__)


def make_random_base(wanted: RandomBase, folder: Path) -> None:
    """Writes the base into `folder`, unless it exists.

    Raises:
        OutputError, ConfigError: the folder holds something else, or a base that was made of something else.
        BaseModelError: the architecture is not supported.
        DataError: the tokenizer cannot be read, or cannot be trained on these texts.
    """
    spec, made_of = read_spec(wanted.architecture), wanted.model_dump(mode="json")
    if (path := folder / _MADE_OF).exists():
        found = read_object(path, ConfigError)
        if changed := [key for key in made_of if found.get(key) != made_of[key]]:
            raise ConfigError(
                f"{path}: this base was made of another {' and '.join(changed)} than `scratch` has now; remove the "
                f"study's folder {folder.parent}, or give the study another one"
            )
        return
    with published_folder(folder, None) as unfinished:
        if isinstance(wanted.tokenizer, Path):
            _copy_tokenizer(wanted.tokenizer, unfinished)
        else:
            _train_tokenizer(wanted.tokenizer, unfinished)
        tokenizer = load_tokenizer(unfinished)
        config = AutoConfig.from_pretrained(wanted.architecture, local_files_only=True, trust_remote_code=False)
        config.vocab_size = max(tokenizer.vocab_size, config.vocab_size)
        config.eos_token_id = tokenizer.document_end[-1]
        config.bos_token_id = [*tokenizer.document_start, config.eos_token_id][0]
        torch.manual_seed(wanted.seed)
        logging.disable_progress_bar()
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(unfinished)
        write_json(unfinished / _MADE_OF, made_of)
    _logger.info("wrote a base of %d layers with random weights to %s", spec.num_layers, folder)


def _copy_tokenizer(path: Path, folder: Path) -> None:
    source = tokenizer_file(path)
    tokenizer = load_tokenizer(source)
    shutil.copyfile(source, folder / "tokenizer.json")
    if (source.parent / _TOKENIZER_CONFIG).is_file():
        shutil.copyfile(source.parent / _TOKENIZER_CONFIG, folder / _TOKENIZER_CONFIG)
    else:
        _write_tokenizer_config(folder, eos_token=tokenizer.decode(tokenizer.document_end))


def _train_tokenizer(wanted: NewTokenizer, folder: Path) -> None:
    parts = (texts(part.input, text_key=part.text_key, max_bytes=int(part.mib * 2**20)) for part in wanted.texts)
    tokenizer = train_tokenizer(chain.from_iterable(parts), wanted.vocab_size)
    if wanted.start_token:
        start = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[start])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _write_tokenizer_config(folder: Path, **special: str) -> None:
    write_json(folder / _TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def train_tokenizer(documents: Iterator[str], vocab_size: int, *, character_coverage: float = 0.9999) -> Tokenizer:
    """A tokenizer like Llama's, BPE with byte fallback, which SentencePiece learns from these documents.

    Raises:
        DataError: there is too little text, or it is too uniform, for this vocabulary size.
    """
    with tempfile.TemporaryDirectory() as temporary:
        try:
            with (Path(temporary) / "tokenizer.model").open("wb") as model:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=_sentences(documents),
                    model_writer=model,
                    vocab_size=vocab_size,
                    model_type="bpe",
                    byte_fallback=True,
                    character_coverage=character_coverage,
                    split_digits=True,
                    normalization_rule_name="identity",
                    remove_extra_whitespaces=False,
                    allow_whitespace_only_pieces=True,
                    max_sentence_length=_MAX_SENTENCE_BYTES,
                    num_threads=len(os.sched_getaffinity(0)),
                    minloglevel=2,
                )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].replace("--character_coverage", "--character-coverage")
            raise DataError(f"cannot train {vocab_size} pieces on this text: {reason}") from None
        # sentencepiece and transformers treat leading spaces differently: one tokenizer.json serves us and them.
        tokenizer: Tokenizer = LlamaTokenizer.from_pretrained(temporary).backend_tokenizer
    return tokenizer


def _sentences(documents: Iterator[str]) -> Iterator[str]:
    """Documents line by line: SentencePiece learns from sentences, and would drop a long document."""
    step = _MAX_SENTENCE_BYTES // 4  # a character has at most four bytes
    for document in documents:
        for line in document.split("\n"):
            yield from (line[at : at + step] for at in range(0, len(line), step))
