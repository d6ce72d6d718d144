"""Reads YAML into checked settings: the base class and types of all sections, and errors in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.errors import ConfigError, nearest
from pipeline.files import read_text

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Texts = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
"""A list, or one text in its place."""


# What earlier versions called settings, and values of settings: an old file gets the new name in its error.
RENAMED_KEYS = {
    "upscaled": "init_expansion",
    "openings": "prompts",
    "opening_tokens": "prompt_tokens",
    "rehearsal_fraction": "self_generated_fraction",
    "rehearsal_coefficient": "self_generated_coefficient",
}
RENAMED_VALUES = {"rehearsal": "self_generated", "mend": "fix_encoding", "stock": "merged"}


class Section(BaseModel):
    """A part of the configuration: immutable; unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True
    )


S = TypeVar("S", bound=Section)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [
            key.value
            for key, _ in node.value
            if isinstance(key, yaml.ScalarNode) and key.value != "<<"
        ]
        if repeated := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {repeated[0]} is given twice in one section", node.start_mark
            )
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`; raises ConfigError where it is missing or holds something else."""
    try:
        text = read_text(path, ConfigError, "name a YAML file")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: cannot read this configuration: {error.strerror}; give a run's YAML file"
        ) from None
    values = parse_yaml(text, f"{path}: not a YAML file")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    return values


def parse_yaml(text: str, fault: str) -> Any:
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
        faults = "; ".join(
            f"{_dotted(fault['loc'])}: {_plain(kind, fault)}" for fault in error.errors()
        )
        raise ConfigError(
            f"{source}: {error.error_count()} fault(s): {faults}; {listed_in} lists every setting"
        ) from None


def with_defaults(annotation: Any, value: Any) -> Any:
    """`value`, recorded as JSON, with the defaults of settings that did not exist at the time."""
    kind = TypeAdapter[Any](annotation)
    try:
        return kind.dump_python(kind.validate_python(value), mode="json")
    except ValidationError:  # of an earlier version
        return value


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested `values`, by dotted path."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _dotted(location: tuple[int | str, ...]) -> str:
    # pydantic puts the tag of a union into the path (method.scale.l_fp), which is not in the user's file.
    parts = [str(part) for part in location]
    parts = [part for before, part in zip(["", *parts], parts, strict=False) if before != "method"]
    return ".".join(parts) or "the configuration"


def _plain(kind: type[BaseModel], fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        key = str(fault["loc"][-1])
        if key in RENAMED_KEYS:
            return f"is called {RENAMED_KEYS[key]} now"
        schema = kind.model_json_schema()
        known = {
            name
            for section in (schema, *schema.get("$defs", {}).values())
            for name in section.get("properties", {})
        }
        return "unknown key" + (
            "" if key in known else nearest(key, known)
        )  # it may be one of another section
    if fault["type"] == "missing":
        return "missing"
    if fault["type"] == "literal_error" and fault["input"] in RENAMED_VALUES:
        return f"{fault['input']!r} is called {RENAMED_VALUES[fault['input']]!r} now"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if isinstance(fault.get("input"), (str, int, float, bool)):
        message += f" (found {fault['input']!r:.120})"
    return message
