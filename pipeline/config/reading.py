"""Reads YAML into checked settings: the base class of sections, and errors in one line."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from pipeline.errors import ConfigError, did_you_mean
from pipeline.files.reading import read_text

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]
"""At most three years: timers of torch and Python count to some more."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Texts = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
"""A list, or one text in its place."""


# Names of settings and of their values in earlier versions. The error about an old name in a file
# gives the new one; records that earlier versions wrote are read with the new names.
RENAMED_KEYS = {
    "upscaled": "init_expansion",
    "openings": "prompts",
    "opening_tokens": "prompt_tokens",
    "rehearsal_fraction": "self_generated_fraction",
    "rehearsal_coefficient": "kl_coefficient",
}
RENAMED_VALUES = {"rehearsal": "self_generated", "mend": "fix_encoding", "stock": "merged"}
# Those that files may still have: settings of a method, and kinds of parameters.
STILL_READ_KEYS = {
    "own_rows": "open_rows",
    "own_gains": "open_gains",
    "own_first_layer": "open_first_layer",
}


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that an earlier version recorded, with today's names."""
    renamed: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            value = with_new_names(value)
        elif key == "role":
            value = RENAMED_VALUES.get(value, value)
        renamed[RENAMED_KEYS.get(key, key)] = value
    return renamed


def with_todays_names(
    settings: Mapping[str, Any], *, known: Container[str] | None = None
) -> dict[str, Any]:
    """Settings with today's names in place of earlier ones that are still read.

    `known` are the names that the section has, where it is known: a section without today's name
    keeps its key, which is an unknown one, or that of an extension's own setting.

    Raises:
        ValueError: a setting has both names, with different values.
    """
    renamed: dict[str, Any] = {}
    for key, value in settings.items():
        name = STILL_READ_KEYS.get(key, key)
        if known is not None and name not in known:
            name = key
        if name in renamed and renamed[name] != value:
            earlier = next(old for old, new in STILL_READ_KEYS.items() if new == name)
            raise ValueError(
                f"{earlier} is the earlier name of {name}, and the two have different values; "
                f"remove {earlier}"
            )
        renamed[name] = value
    return renamed


def with_todays_kinds(keys: Iterable[str]) -> tuple[str, ...]:
    """Kinds of parameters, or patterns of their names, with today's names of kinds."""
    return tuple(STILL_READ_KEYS.get(key, key) for key in keys)


_SCALARS = (str, int, float, bool)
_EXPECTED = {
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of settings",
    "model_type": "a mapping of settings",
}
"""What a setting needs, by pydantic's type of the error."""


class Section(BaseModel):
    """A part of the configuration: immutable; unknown keys are refused."""

    model_config = ConfigDict(
        # A misspelled setting would otherwise have no effect, and nothing would say so.
        extra="forbid",
        frozen=True,
        # They become the descriptions of settings in docs/configuration.md.
        use_attribute_docstrings=True,
        # A name such as `2026` is a number in YAML.
        coerce_numbers_to_str=True,
    )

    @field_validator("*")
    @classmethod
    def _in_home(cls, value: Any) -> Any:
        """A path that begins with `~` as the shell reads it, not as a folder of that name."""
        return value.expanduser() if isinstance(value, Path) else value


S = TypeVar("S", bound=Section)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would take the last one, and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            # YAML allows the merge key << more than once.
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in seen:
                fault = f"the key {key.value} is given twice in one section"
                raise yaml.constructor.ConstructorError(None, None, fault, node.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds something else than a mapping.
    """
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
    """The value that is written in YAML in `text`.

    Raises:
        ConfigError: `text` is no YAML; the message begins with `fault`.
    """
    try:
        return yaml.load(text, _UniqueKeys)  # a SafeLoader: it builds plain values only
    # ValueError: a date that does not exist, or a number of thousands of digits.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{fault}: {' '.join(str(error).split())}") from None


def checked(kind: type[S], values: Mapping[str, Any], *, source: str, listed_in: str) -> S:
    """`values` as a section of the class `kind`.

    Raises:
        ConfigError: `values` have faults; all of them, with their dotted paths, are in its one
            line. `source` is the origin of the values, and `listed_in` the page on every setting.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults: list[str] = []
        for fault in error.errors():
            faults.append(f"{_dotted(fault['loc'])}: {_plain(kind, fault)}")
        raise ConfigError(
            f"{source}: {len(faults)} fault(s): {'; '.join(faults)}; {listed_in} lists every "
            "setting"
        ) from None


def with_defaults(annotation: Any, value: Any) -> Any:
    """A recorded value, with the defaults of settings that did not exist when it was recorded."""
    kind = TypeAdapter[Any](annotation)
    try:
        return kind.dump_python(kind.validate_python(value), mode="json")
    except ValidationError:
        # An earlier version had other settings: it is compared as it was recorded.
        return value


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested `values`, by dotted path."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _dotted(location: tuple[int | str, ...]) -> str:
    """The path of a setting in the user's file, such as `method.l_fp`."""
    parts: list[str] = []
    before = ""
    for part in map(str, location):
        # pydantic adds the tag of a union (method.scale.l_fp), which is no key of the user's file.
        if before != "method":
            parts.append(part)
        before = part
    return ".".join(parts) or "the configuration"


def _plain(kind: type[BaseModel], fault: Mapping[str, Any]) -> str:
    """One of pydantic's faults, in words for users."""
    if fault["type"] == "extra_forbidden":
        return _unknown_key(kind, str(fault["loc"][-1]))
    if fault["type"] == "missing":
        return "missing"
    if fault["type"] == "literal_error" and str(fault["input"]) in RENAMED_VALUES:
        return f"{fault['input']!r} is called {RENAMED_VALUES[fault['input']]!r} now"
    if fault["type"] in _EXPECTED:
        found = fault["input"]
        shown = f"{found!r:.120}" if isinstance(found, _SCALARS) else type(found).__name__
        return f"expected {_EXPECTED[fault['type']]}, found {shown}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if isinstance(fault.get("input"), _SCALARS):
        message += f" (found {fault['input']!r:.120})"
    return message


def _unknown_key(kind: type[BaseModel], key: str) -> str:
    """What is wrong with a key that its section does not have."""
    if key in RENAMED_KEYS:
        return f"is called {RENAMED_KEYS[key]} now"
    schema = kind.model_json_schema()
    known: set[str] = set()
    for section in (schema, *schema.get("$defs", {}).values()):
        known.update(section.get("properties", {}))
    if STILL_READ_KEYS.get(key, key) in known:
        # It is a key of another section: a similar key of this one would be wrong advice.
        return "unknown key"
    return "unknown key" + did_you_mean(key, known)
