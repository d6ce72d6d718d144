"""Prints every setting of a run, with type, default and meaning.

    scale-cpt describe-config

docs/configuration.md has the same tables, which a test compares with this output.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.run import RunConfig
from pipeline.installation import locate_docs

_WORDS = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    date: "date",
    Path: "path",
    type(None): "nothing",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def main(arguments: argparse.Namespace) -> None:
    print(locate_docs("".join(_tables())), end="")


def _tables() -> Iterator[str]:
    """A table of the settings outside of sections, then one for each section."""
    fields = RunConfig.model_fields
    yield _heading("Top level", "Settings of a run outside of its sections.")
    for name, field in fields.items():
        if not _sections(field.annotation):
            yield _row(name, field)
    for name, field in fields.items():
        alternatives = _sections(field.annotation)
        required = " Required." if field.is_required() else ""
        if len(alternatives) == 1:
            yield from _table(name, alternatives[0], required)
        elif alternatives:
            yield _heading(f"`{name}`", f"One of these, by its `name`.{required}")
            for section in alternatives:
                (kind,) = get_args(section.model_fields["name"].annotation)
                yield f"| `name: {kind}` | | **{_summary(section)}** |\n"
                yield from _rows(section)


def _table(path: str, section: type[BaseModel], required: str = "") -> Iterator[str]:
    yield _heading(f"`{path}`", _summary(section) + required)
    yield from _rows(section)
    for name, field in section.model_fields.items():
        sections = _sections(field.annotation)
        # The values of other mappings are numbers, which the row of the setting describes.
        if get_origin(field.annotation) is dict and sections:
            yield from _table(f"{path}.{name}.<name>", sections[0])


def _heading(title: str, summary: str) -> str:
    return f"\n## {title}\n\n{summary}\n\n| key | type, default | meaning |\n|---|---|---|\n"


def _summary(section: type[BaseModel]) -> str:
    """The first paragraph of a section's docstring, in one line."""
    paragraph, _, _ = (section.__doc__ or "").partition("\n\n")
    return " ".join(paragraph.split())


def _rows(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The rows of a section's settings, each followed by the rows of a section inside it."""
    for name, field in section.model_fields.items():
        origin = get_origin(field.annotation)
        if name == "name" and origin is Literal:
            continue  # `_tables` shows it.
        inner: list[type[BaseModel]] = []
        if origin is not dict:
            inner = _sections(field.annotation)
        summary = _summary(inner[0]).rstrip(".") if inner else ""
        yield _row(prefix + name, field, summary)
        for child in inner:
            yield from _rows(child, f"{prefix}{name}.")


def _row(key: str, field: FieldInfo, summary: str = "") -> str:
    """The row of a setting; `summary` is its meaning where the setting describes none."""
    meaning = " ".join((field.description or summary).split()).replace("|", r"\|")
    return f"| `{key}` | {_type_and_default(field)} | {meaning} |\n"


def _type_and_default(field: FieldInfo) -> str:
    """A setting's type and its default, as YAML has it."""
    default = field.default
    if field.is_required():
        return f"{_type(field.annotation)}, required"
    if default is None or isinstance(default, BaseModel):
        return f"{_type(field.annotation).removesuffix(' or nothing')}, optional"
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, tuple):
        default = list(default)
    kind = _type(field.annotation)
    if f"`{default}`" in kind:  # one of the words that the setting may have
        return kind.replace(f"`{default}`", f"`{default}` (default)", 1)
    return f"{kind}, `{default}`"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The classes of sections in a type such as `list[Section] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    sections: list[type[BaseModel]] = []
    for part in get_args(annotation):
        sections += _sections(part)
    return sections


def _type(annotation: Any) -> str:
    """A setting's type in words."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, types.UnionType):
        words = [_type(part) for part in parts]
        return " or ".join(dict.fromkeys(words))
    if origin in (list, tuple):
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return f"one {_type(parts[1])} a name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _WORDS.get(annotation, str(annotation))
