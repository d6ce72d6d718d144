"""Prints every setting of a run, with type, default and meaning.

    scale-cpt describe-config

docs/configuration.md has the same lists, which a test compares with this output.
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
    print(locate_docs("".join(_lists())), end="")


def _lists() -> Iterator[str]:
    """A list of the settings outside of sections, then one for each section."""
    fields = RunConfig.model_fields
    yield _heading("Top level", "Settings of a run outside of its sections.")
    for name, field in fields.items():
        if not _sections(field.annotation):
            yield _item([name], [_type_and_default(field)], _meaning(field, []))
    for name, field in fields.items():
        alternatives = _sections(field.annotation)
        required = " Required." if field.is_required() else ""
        if len(alternatives) == 1:
            yield from _section(name, alternatives[0], required)
        elif alternatives:
            yield _heading(f"`{name}`", f"One of these, by its `name`.{required}")
            yield "\n".join(_alternatives(alternatives))


def _alternatives(sections: list[type[BaseModel]]) -> Iterator[str]:
    """Each of the sections of which a run has one: what it is, and its settings."""
    for section in sections:
        (kind,) = get_args(section.model_fields["name"].annotation)
        items = "".join(_items(section))
        yield f"**`name: {kind}`** {_summary(section)}\n" + (f"\n{items}" if items else "")


def _section(path: str, section: type[BaseModel], required: str = "") -> Iterator[str]:
    yield _heading(f"`{path}`", _summary(section) + required)
    yield from _items(section)
    for name, field in section.model_fields.items():
        sections = _sections(field.annotation)
        # The values of other mappings are numbers, which the item of the setting describes.
        if get_origin(field.annotation) is dict and sections:
            yield from _section(f"{path}.{name}.<name>", sections[0])


def _heading(title: str, summary: str) -> str:
    return f"\n## {title}\n\n{summary}\n\n"


def _summary(section: type[BaseModel]) -> str:
    """The first paragraph of a section's docstring, in one line."""
    paragraph, _, _ = (section.__doc__ or "").partition("\n\n")
    return " ".join(paragraph.split())


def _items(section: type[BaseModel]) -> Iterator[str]:
    """The items of a section's settings: neighbours of one meaning share an item."""
    for meaning, group in itertools.groupby(_settings(section), lambda setting: setting[2]):
        settings = list(group)
        keys = [key for key, _, _ in settings]
        yield _item(keys, [kind for _, kind, _ in settings], meaning)


def _item(keys: list[str], kinds: list[str], meaning: str) -> str:
    names = ", ".join(f"`{key}`" for key in keys)
    return f"- {names} ({'; '.join(dict.fromkeys(kinds))}): {meaning}\n"


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """A section's settings, each followed by those of a section inside it: key, type and default,
    meaning."""
    for name, field in section.model_fields.items():
        origin = get_origin(field.annotation)
        if name == "name" and origin is Literal:
            continue  # `_alternatives` shows it.
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
    return " ".join((field.description or summary).split())


def _is_described_elsewhere(field: FieldInfo) -> bool:
    return (field.description or "").startswith("as in ")


def _type_and_default(field: FieldInfo) -> str:
    """A setting's type and its default, as YAML has it. A number or a text that is a default shows
    its type; of words that may be chosen the default is bold. What has neither a default nor
    "required" may be left out."""
    default = field.default
    kind = _type(field.annotation)
    if field.is_required():
        return f"{kind}, required"
    if default is None or isinstance(default, BaseModel):
        return kind.removesuffix(" or nothing")
    if default in ([], {}):
        return kind
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        default = list(default)
    if f"`{default}`" in kind:
        return kind.replace(f"`{default}`", f"**`{default}`**", 1)
    return f"`{default}`"


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
