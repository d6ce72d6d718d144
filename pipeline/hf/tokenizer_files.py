"""Copies a tokenizer into an export, so that every server reads the same ids from it.

The files come from a stranger's folder and may be published: their names are fixed or match a
pattern, and no link leads out of the folder.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.data.tokenizer.chats import TEMPLATE, template_in
from pipeline.data.tokenizer.encoders import SentencePieceEncoder
from pipeline.data.tokenizer.extension.vocabulary import EXPORTED, RECORD
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.sentencepiece_model import MODEL_FILES, converted
from pipeline.data.tokenizer.settings import read_as_it_is
from pipeline.data.tokenizer.tokenizer_file import TOKENIZER_FILE, without_dropout
from pipeline.errors import BaseModelError
from pipeline.files.json_files import read_object, write_json
from pipeline.files.publishing import write_text
from pipeline.files.reading import read_inside

_TOKENIZER = re.compile(
    r"(tokenizer|spiece|sentencepiece\.bpe)\.model|tokenizer\.model\.v\d+|[\w-]+\.tiktoken|tekken\.json|vocab\.(json|txt)|"
    r"merges\.txt|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template)\.json|chat_template\.jinja"
)
_TEMPLATE = re.compile(r"[\w-]+\.jinja")
_CONFIG = "tokenizer_config.json"
_MORE_TEMPLATES = "additional_chat_templates"


def copy_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Copies into `folder` the tokenizer of the folder `tokenizer`, so that every server reads its
    tokenizer.json.

    The chat template is put where every server looks: a file of its own, and tokenizer_config.json.
    Code that the latter names is not kept: the only code of an export is that of `remote_code`. Nor
    is a class that would build another tokenizer than tokenizer.json says, and BPE dropout is off,
    as in training.

    Raises:
        BaseModelError: a file cannot be read, or links out of its folder.
    """
    for name in tokenizer_files(tokenizer):
        written = EXPORTED if name == RECORD else name
        copy_file(tokenizer, name, folder / written)
    with suppress(FileNotFoundError):
        without = without_dropout(read_object(folder / TOKENIZER_FILE, BaseModelError))
        if without is not None:
            write_json(folder / TOKENIZER_FILE, without)
    config = _tokenizer_config(folder)
    template = template_in(folder, config)
    if template is not None:
        write_text(folder / TEMPLATE, template)
        if not isinstance(config.get("chat_template"), list):
            config["chat_template"] = template
    config.pop("auto_map", None)
    if (folder / TOKENIZER_FILE).exists():
        config = read_as_it_is(config, read_object(folder / TOKENIZER_FILE, BaseModelError))
    if config:
        write_json(folder / _CONFIG, config)


def tokenizer_files(folder: Path) -> list[str]:
    """The files of the tokenizer in `folder` that an export takes, by their paths in it."""
    names = matching_files(folder, _TOKENIZER)
    for name in matching_files(folder / _MORE_TEMPLATES, _TEMPLATE):
        names.append(f"{_MORE_TEMPLATES}/{name}")
    if (folder / RECORD).exists():
        names.append(RECORD)
    return names


def add_tokenizer_json(folder: Path, tokenizer: Path) -> None:
    """Writes a tokenizer.json into `folder` where the folder `tokenizer` has only a model of
    SentencePiece.

    Raises:
        DataError: the model cannot be read or converted.
    """
    has_model = any((tokenizer / name).exists() for name in MODEL_FILES)
    if (folder / TOKENIZER_FILE).exists() or not has_model:
        return
    loaded = load_tokenizer(tokenizer)
    assert isinstance(loaded.reference, SentencePieceEncoder), "a folder without a tokenizer.json"
    library = converted(loaded.reference.model, loaded.document_start)
    write_text(folder / TOKENIZER_FILE, library.to_str())
    processor = loaded.reference.model.processor
    ids = {
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "unk_token": processor.unk_id(),
    }
    config: dict[str, Any] = {}
    for name, number in ids.items():
        if number >= 0:  # -1: the model has no such token
            config[name] = processor.id_to_piece(number)
    # What the folder states itself counts.
    config |= _tokenizer_config(folder)
    write_json(folder / _CONFIG, read_as_it_is(config, json.loads(library.to_str())))


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's tokenizer_config.json; empty if there is none."""
    try:
        return read_object(folder / _CONFIG, BaseModelError)
    except FileNotFoundError:
        return {}


def copy_file(source: Path, name: str, written: Path) -> None:
    """Copies a file of the folder `source`, if there is one."""
    with suppress(FileNotFoundError):
        content = read_inside(source, name, BaseModelError)
        written.parent.mkdir(exist_ok=True)
        written.write_bytes(content)


def matching_files(folder: Path, names: re.Pattern[str]) -> list[str]:
    """The names of the files in `folder` that the pattern matches, sorted."""
    found = []
    for path in folder.glob("*"):
        if names.fullmatch(path.name) and not path.is_dir():
            found.append(path.name)
    return sorted(found)
