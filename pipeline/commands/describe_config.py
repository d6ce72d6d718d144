"""Prints every setting of a run, with type, default and meaning.

    scale-cpt describe-config

A test compares that page with this output.
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
from pipeline.files import with_pages_found

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
    """None."""


def main(arguments: argparse.Namespace) -> None:
    print(with_pages_found("".join(_tables())), end="")


def _tables() -> Iterator[str]:
    """A table of the keys outside of sections, then one for each section."""
    fields = RunConfig.model_fields
    yield _heading("Top level", "Settings of a run outside of its sections.")
    yield from (
        _row(name, field) for name, field in fields.items() if not _sections(field.annotation)
    )
    for name, field in fields.items():
        alternatives, required = (
            _sections(field.annotation),
            " Required." if field.is_required() else "",
        )
        if len(alternatives) == 1:
            yield from _table(name, alternatives[0], required)
        elif alternatives:
            yield _heading(f"`{name}`", f"One of these, by its `name`.{required}")
            for section in alternatives:
                (kind,) = get_args(section.model_fields["name"].annotation)
                yield f"| `name: {kind}` | | | **{_summary(section)}** |\n"
                yield from _rows(section)


def _table(path: str, section: type[BaseModel], required: str = "") -> Iterator[str]:
    yield _heading(f"`{path}`", _summary(section) + required)
    yield from _rows(section)
    for name, field in section.model_fields.items():
        if get_origin(field.annotation) is dict:
            yield from _table(f"{path}.{name}.<name>", _sections(field.annotation)[0])


def _heading(title: str, summary: str) -> str:
    return f"\n## {title}\n\n{summary}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"


def _summary(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _rows(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The rows of a section's keys, each followed by those of the section in it."""
    for name, field in section.model_fields.items():
        if name == "name" and get_origin(field.annotation) is Literal:
            continue
        inner = [] if get_origin(field.annotation) is dict else _sections(field.annotation)
        yield _row(prefix + name, field, _summary(inner[0]).rstrip(".") if inner else "")
        for child in inner:
            yield from _rows(child, f"{prefix}{name}.")


def _row(key: str, field: FieldInfo, summary: str = "") -> str:
    meaning = " ".join((field.description or summary).split()).replace("|", r"\|")
    default = field.default
    if field.is_required():
        shown = "required"
    elif default is None or isinstance(default, BaseModel):
        shown = ""
    else:
        value = str(default).lower() if isinstance(default, bool) else default
        shown = f"`{list(value) if isinstance(value, tuple) else value}`"
    return f"| `{key}` | {_type(field.annotation)} | {shown} | {meaning} |\n"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for part in get_args(annotation) for inner in _sections(part)]


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in parts))
    if origin in (list, tuple):
        return f"list of {_type(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return "one section a name" if origin is dict else _WORDS.get(annotation, str(annotation))
