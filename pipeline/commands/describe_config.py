"""Prints every setting of a run, with type, default and meaning.

    scale-cpt describe-config

docs/configuration.md has the same tables, which a test compares with this output.
"""

from __future__ import annotations

import argparse
import itertools
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
            yield f"| `{name}` | {_type_and_default(field)} | {_meaning(field, [])} |\n"
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


def _rows(section: type[BaseModel]) -> Iterator[str]:
    """The rows of a section's settings: neighbours of one meaning share a row."""
    settings = list(_settings(section))
    for meaning, group in itertools.groupby(settings, lambda setting: setting[2]):
        rows = list(group)
        keys = ", ".join(f"`{key}`" for key, _, _ in rows)
        kinds = dict.fromkeys(kind for _, kind, _ in rows)
        yield f"| {keys} | {'; '.join(kinds)} | {meaning} |\n"


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """A section's settings, each followed by those of a section inside it: key, type and default,
    meaning."""
    for name, field in section.model_fields.items():
        origin = get_origin(field.annotation)
        if name == "name" and origin is Literal:
            continue  # `_tables` shows it.
        inner: list[type[BaseModel]] = []
        if origin is not dict:
            inner = _sections(field.annotation)
        yield prefix + name, _type_and_default(field), _meaning(field, inner)
        if not _is_described_elsewhere(field):
            for child in inner:
                yield from _settings(child, f"{prefix}{name}.")


def _meaning(field: FieldInfo, inner: list[type[BaseModel]]) -> str:
    """What a setting describes, or else the summary of the section inside it."""
    summary = _summary(inner[0]).rstrip(".") if inner else ""
    return " ".join((field.description or summary).split()).replace("|", r"\|")


def _is_described_elsewhere(field: FieldInfo) -> bool:
    return (field.description or "").startswith("as in ")


def _type_and_default(field: FieldInfo) -> str:
    """A setting's type and its default, as YAML has it; one with neither default nor "required" may
    be left out."""
    default = field.default
    if field.is_required():
        return f"{_type(field.annotation)}, required"
    if default is None or isinstance(default, BaseModel):
        return _type(field.annotation).removesuffix(" or nothing")
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"  # that it is true or false needs no word
    if isinstance(default, tuple):
        default = list(default)
    if default in ([], {}):
        return _type(field.annotation)
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
