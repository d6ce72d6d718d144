"""Reads YAML into checked settings: the base class and types of all sections, and errors in one line."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import ConfigError, nearest
from pipeline.files import read_text

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""A list, or one text in its place."""


class Section(BaseModel):
    """A part of the configuration: immutable; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:  # noqa: ANN401  # pydantic would read it as 1
        for name, value in values.items() if isinstance(values, Mapping) else ():
            given = value if isinstance(value, (list, tuple)) else [value]
            field = cls.model_fields.get(name)
            if field is not None and field.annotation is not bool and any(isinstance(item, bool) for item in given):
                raise ValueError(f"{name}: expected neither true nor false")
        return values


S = TypeVar("S", bound=Section)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if repeated := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {repeated[0]} is given twice in one section", node.start_mark
            )
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds something else.
    """
    try:
        text = read_text(path, ConfigError, "name a YAML file")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: cannot read this configuration: {error.strerror}; give a run's YAML file") from None
    values = parse_yaml(text, f"{path}: not a YAML file")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    return values


def parse_yaml(text: str, fault: str) -> Any:  # noqa: ANN401
    """The value that `text` is in YAML; raises ConfigError, which begins with `fault`, for what is no YAML."""
    try:
        return yaml.load(text, _UniqueKeys)  # a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{fault}: {' '.join(str(error).split())}") from None


def checked(kind: type[S], values: Mapping[str, Any], *, source: str, listed_in: str) -> S:
    """`values` as a section of the class `kind`.

    Raises:
        ConfigError: all faults with their dotted paths, in one line; `source` is the origin of the values, and
            `listed_in` the page that documents every setting.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(f"{_dotted(fault['loc'])}: {_plain(kind, fault)}" for fault in error.errors())
        raise ConfigError(
            f"{source}: {error.error_count()} fault(s): {faults}; {listed_in} lists every setting"
        ) from None


def types_of(annotation: Any) -> list[Any]:  # noqa: ANN401
    """The types that a value of this annotation may have, without None and without limits."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return types_of(parts[0])
    if origin in (Union, types.UnionType):
        return [kind for part in parts if part is not types.NoneType for kind in types_of(part)]
    return [annotation]


def with_defaults(annotation: Any, value: Any) -> Any:  # noqa: ANN401
    """`value`, recorded as JSON, with the defaults of settings that did not exist at the time, at any depth."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    for kind in types_of(annotation) if isinstance(value, dict) else ():
        if is_section(kind) and _tag(kind) in (None, value.get("name")):
            fields = kind.model_fields
            whole = {name: field.default for name, field in fields.items() if not field.is_required()} | value
            whole |= {
                name: with_defaults(fields[name].annotation, whole[name]) for name in whole.keys() & fields.keys()
            }
            return whole
        if get_origin(kind) is dict:
            return {name: with_defaults(get_args(kind)[1], item) for name, item in value.items()}
    return value


def is_section(kind: Any) -> bool:  # noqa: ANN401
    """Whether a type is that of a section."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _tag(kind: type[BaseModel]) -> object:
    name = kind.model_fields.get("name")
    return get_args(name.annotation)[0] if name is not None and get_args(name.annotation) else None


def _dotted(location: tuple[int | str, ...]) -> str:
    # pydantic puts the tag of a union into the path (method.scale.l_fp), which is not in the user's file.
    parts = [str(part) for part in location]
    parts = [part for before, part in zip(["", *parts], parts, strict=False) if before != "method"]
    return ".".join(parts) or "the configuration"


def _plain(kind: type[BaseModel], fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        key, schema = str(fault["loc"][-1]), kind.model_json_schema()
        known = {
            name for section in (schema, *schema.get("$defs", {}).values()) for name in section.get("properties", {})
        }
        return "unknown key" + ("" if key in known else nearest(key, known))  # it may be one of another section
    if fault["type"] == "missing":
        return "missing"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if isinstance(fault.get("input"), (str, int, float, bool)):
        message += f" (found {fault['input']!r:.120})"
    return message
