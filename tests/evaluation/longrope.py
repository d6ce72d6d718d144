"""A base whose rotary frequencies change with length, and texts that are shorter and longer."""

from __future__ import annotations

from pathlib import Path

from tests.extensions.self_generated.helpers import random_base
from tests.files import change_json

SENTENCE = "Once upon a time there was a little girl who lived in a small house with a big dog and a red ball ."
TEMPLATE = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
CONTEXT = 32
"""Of the base phi3, before its frequencies change."""


def text_of(words: int) -> str:
    return " ".join((SENTENCE.split() * 20)[:words])


def write_longrope(folder: Path) -> Path:
    """A random model of Phi-3, with a chat template."""
    random_base("phi3", folder)
    change_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    # Many ends, so that answers differ in length.
    change_json(folder / "generation_config.json", eos_token_id=[*range(2, 600, 15)])
    return folder
