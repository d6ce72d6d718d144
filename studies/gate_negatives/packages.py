"""Sentences of packages of free licences: messages of Django, examples of spaCy, and their code.

The packages are read as wheels, files of PyPI, and never imported.
"""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from babel.messages.pofile import read_po

from studies.gate_negatives.records import Record, generator, joined

CHARACTERS = 1800
"""How many characters a language has of messages, and a language of programs of code, at most."""
_LEAST_MESSAGE = 15
_PLACEHOLDERS = ("%", "{", "<", "\\", "`")
_NAMES = {"zh_Hans": "zh", "xx": None}
"""Kinds by the packages' names of languages, where they differ from CLDR's; None: left out."""
_CODE = {
    "code:python": (".py", "django/db/models/"),
    "code:javascript": (".js", "django/contrib/admin/static/admin/js/"),
    "code:css": (".css", "django/contrib/admin/static/admin/css/"),
    "code:html": (".html", "django/contrib/admin/templates/"),
}


def django_records(wheel: Path) -> Iterator[Record]:
    """Django's translated messages, and some of its code."""
    with ZipFile(wheel) as files:
        messages: dict[str, list[str]] = {}
        for path in sorted(files.namelist()):
            if not path.endswith("/LC_MESSAGES/django.po"):
                continue
            language = path.split("/")[-3]
            is_variant = "_" in language and len(language.split("_")[1]) != 4
            if not is_variant:
                own = messages.setdefault(language, [])
                own.extend(_messages(files.read(path), language))
        for language, own in messages.items():
            kind = _kind(language)
            if kind is not None:
                rng = generator(f"django {kind}")
                for text in joined(own, " ", CHARACTERS, rng):
                    yield Record(kind, text)
        yield from _code_records(files)


def _messages(content: bytes, language: str) -> Iterator[str]:
    """The translations that are plain sentences: no placeholders, tags or paths."""
    with contextlib.redirect_stdout(io.StringIO()):
        # Some catalogues have more plural forms than their headers say, which Babel prints.
        catalogue = read_po(io.BytesIO(content))
    for message in catalogue:
        sources = _forms(message.id)
        texts = _forms(message.string)
        if language == "en":
            # English is not translated: a message is its own.
            texts = sources
        elif message.fuzzy or texts[0] == sources[0]:
            continue
        for text in texts:
            is_plain = not any(mark in text for mark in _PLACEHOLDERS)
            if is_plain and len(text) >= _LEAST_MESSAGE:
                yield " ".join(text.split())


def _forms(text: object) -> list[str]:
    """A message and its plural forms, or the one text."""
    if isinstance(text, str):
        return [text]
    assert isinstance(text, (tuple, list)), "Babel gives several forms"
    return list(text)


def _code_records(files: ZipFile) -> Iterator[Record]:
    for kind, (suffix, folder) in _CODE.items():
        pieces: list[str] = []
        for path in sorted(files.namelist()):
            if path.startswith(folder) and path.endswith(suffix) and "/vendor/" not in path:
                pieces += files.read(path).decode().split("\n\n")
        rng = generator(kind)
        blocks = [piece.strip("\n") for piece in pieces if 40 < len(piece) < 700]
        for text in joined(blocks, "\n\n", CHARACTERS, rng):
            yield Record(kind, text)


def spacy_records(wheel: Path) -> Iterator[Record]:
    """spaCy's example sentences."""
    with ZipFile(wheel) as files:
        for path in sorted(files.namelist()):
            if not (path.startswith("spacy/lang/") and path.endswith("/examples.py")):
                continue
            kind = _kind(path.split("/")[2])
            if kind is None:
                continue
            for node in ast.parse(files.read(path)).body:
                if isinstance(node, ast.Assign):
                    for sentence in ast.literal_eval(node.value):
                        yield Record(kind, " ".join(sentence.split()))


def _kind(language: str) -> str | None:
    return _NAMES.get(language, language.replace("_", "-"))
