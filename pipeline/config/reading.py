"""Reads YAML into checked settings: the base class and types of all sections, and errors in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline import untrusted_files
from pipeline.errors import ConfigError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: immutable; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

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
_MAX_BYTES = 2**20


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
        text = untrusted_files.read_text(path, ConfigError, "name a YAML file", limit=_MAX_BYTES)
        values = yaml.load(text, _UniqueKeys)  # a SafeLoader
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: cannot read this configuration: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    return values


def checked(kind: type[S], values: Mapping[str, Any], *, source: str, listed_in: str) -> S:
    """`values` as a section of the class `kind`.

    Raises:
        ConfigError: all faults with their dotted paths, in one line; `source` is the origin of the values, and
            `listed_in` the page that documents every setting.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(f"{_dotted(fault['loc'])}: {_plain(fault)}" for fault in error.errors())
        raise ConfigError(
            f"{source}: {error.error_count()} fault(s): {faults}; {listed_in} lists every setting"
        ) from None


_LONGEST_VALUE = 120  # in a message


def _dotted(location: tuple[int | str, ...]) -> str:
    # pydantic puts the tag of a union into the path (method.scale.l_fp), which is not in the user's file.
    parts = [str(part) for part in location]
    parts = [part for before, part in zip(["", *parts], parts, strict=False) if before != "method"]
    return ".".join(parts) or "the configuration"


def _plain(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        return "unknown key"
    if fault["type"] == "missing":
        return "missing"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if isinstance(fault.get("input"), (str, int, float, bool)):
        found = repr(fault["input"])
        message += f" (found {found if len(found) <= _LONGEST_VALUE else found[:_LONGEST_VALUE] + '…'})"
    return message
