"""The files of a base that an export keeps: its licence and policy, its tokenizer, how it chats and generates.

They come from a stranger and may be published: names are fixed or match a pattern, and no link leads out of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.data.chats import TEMPLATE, template_in
from pipeline.errors import BaseModelError
from pipeline.files import read_inside, read_object, write_json, write_text

_GENERATION = "generation_config.json"
# Licences ask that they, notices and policies are passed on.
_TERMS = re.compile(r"(?i)(licen[cs]e|notice|copyright|copying|(acceptable_)?use_policy)([-_.][\w.-]*)?")
_TOKENIZER = re.compile(
    r"(tokenizer|spiece|sentencepiece\.bpe)\.model|tokenizer\.model\.v\d+|[\w-]+\.tiktoken|tekken\.json|vocab\.(json|txt)|"
    r"merges\.txt|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template)\.json"
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MORE_TEMPLATES = "additional_chat_templates"
_TEMPLATE_NAMES = re.compile(r"[\w-]+\.jinja")


def terms_in(folder: Path) -> list[str]:
    """The names of the licence, notice and policy files in `folder`."""
    return list(_matching(folder, _TERMS))


def copy_base_files(folder: Path, base: Path, tokenizer: Path) -> None:
    """Copies into `folder` what an export keeps of the folder `base`, with the tokenizer of the folder `tokenizer`.

    Raises:
        BaseModelError, DataError: a file cannot be read, or links out of its folder.
    """
    for name in (_GENERATION, *terms_in(base)):
        _copy(base, name, folder)
    for name in (TEMPLATE, *_matching(tokenizer, _TOKENIZER)):
        _copy(tokenizer, name, folder)
    for name in _matching(tokenizer / _MORE_TEMPLATES, _TEMPLATE_NAMES):
        (folder / _MORE_TEMPLATES).mkdir(exist_ok=True)
        _copy(tokenizer, f"{_MORE_TEMPLATES}/{name}", folder)
    _complete_templates(folder)


def _matching(folder: Path, names: re.Pattern[str]) -> Iterator[str]:
    return (path.name for path in sorted(folder.glob("*")) if names.fullmatch(path.name) and not path.is_dir())


def _copy(source: Path, name: str, folder: Path) -> None:
    with suppress(FileNotFoundError):
        (folder / name).write_bytes(read_inside(source, name, BaseModelError))


def _complete_templates(folder: Path) -> None:
    """Puts the chat template where every server looks: a file of its own, and tokenizer_config.json.

    Code that tokenizer_config.json names is not kept: the only code of an export is `modeling_scale.py`.
    """
    config: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        config = read_object(folder / _TOKENIZER_CONFIG, BaseModelError)
    template = template_in(folder, config)
    if template is not None:
        write_text(folder / TEMPLATE, template)
        if not isinstance(config.get("chat_template"), list):
            config["chat_template"] = template
    config.pop("auto_map", None)
    if config:
        write_json(folder / _TOKENIZER_CONFIG, config)
