"""Where the values of a configuration come from: its file, the files that it extends, and changes on the command line.

A run's folder stands for the file `run.yaml` in it, which the run's first stage wrote.

Later layers change earlier ones key by key:

    a section           merged with that of the layer before, unless its key `name` says that it is another kind
    null for a section  removes it
    any other value     replaces the one before; so does a list, as a whole
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.reading import parse_yaml, read_yaml
from pipeline.errors import ConfigError

EXTENDS = "extends"
COMMAND_LINE = "--set"
RUN_FILE = "run.yaml"
"""In a run's folder: the run with all that its file extends, and with --set."""
CHECKPOINTS = "checkpoints"
"""In a run's folder."""


_ABSENT = object()


class Layer(NamedTuple):
    """Some settings, as nested sections, and their origin."""

    source: str
    values: Mapping[str, Any]


def read_layers(path: Path) -> list[Layer]:
    """The YAML file at `path`, or in the run's folder `path`, after the files that it extends.

    `extends` counts from the file that has it. A run's folder may have been moved, with the folders in it.

    Raises:
        ConfigError: one of the files is missing or no YAML file, or extends itself.
    """
    layers: list[Layer] = []
    seen: list[Path] = []
    before = ""
    current: Path | None = path / RUN_FILE if path.is_dir() else path
    while current is not None:
        try:
            values = read_yaml(current)
        except ConfigError as error:
            raise ConfigError(f"{before}{error}") from None
        if (resolved := current.resolve()) in seen:
            raise ConfigError(f"{before}{current}: this file is extended already; remove one of the keys {EXTENDS}")
        seen.append(resolved)
        parent = values.pop(EXTENDS, None)
        if parent is not None and not isinstance(parent, str):
            raise ConfigError(f"{current}: {EXTENDS}: expected the path of one YAML file, found {parent!r}")
        layers.insert(0, Layer(str(current), values))
        before = f"{current}: {EXTENDS}: "
        current = None if parent is None else current.parent / parent
    if path.is_dir() and Path(old := str(layers[-1].values.get("folder"))).resolve() != path.resolve():
        layers.append(Layer(str(path), {**_moved(layers[-1].values, Path(old), path), "folder": str(path)}))
    return layers


def _moved(values: Mapping[str, Any], old: Path, new: Path) -> dict[str, Any]:
    """The folders among `values` that lay in the folder `old`, in `new`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {key: inner} if (inner := _moved(value, old, new)) else {}
        elif key in ("folder", "upscaled") and value and Path(str(value)).is_relative_to(old):
            found[key] = str(new / Path(str(value)).relative_to(old))
    return found


def combined(layers: Iterable[Layer]) -> dict[str, Any]:
    """The settings of all layers."""
    return reduce(merged, (layer.values for layer in layers), {})


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `changes`, section by section."""
    result = dict(settings)
    for key, value in changes.items():
        before = result.get(key)
        if isinstance(before, Mapping) and value is None:
            del result[key]
        elif (
            isinstance(before, Mapping)
            and isinstance(value, Mapping)
            and value.get("name") in (None, before.get("name"))
        ):
            result[key] = merged(before, value)
        else:
            result[key] = value
    return result


def source_of(layers: Sequence[Layer], keys: Sequence[str]) -> str | None:
    """The origin of the value under `keys` in the combined settings; None: no layer has it, so it is the default."""
    for layer in reversed(layers):
        values: Any = layer.values
        for key in keys:
            values = values.get(key, _ABSENT) if isinstance(values, Mapping) else _ABSENT
        if values is not _ABSENT:
            return layer.source
    return None


def change_of(text: str) -> Layer:
    """The layer of an argument such as `schedule.steps=20`, whose value is YAML; raises ConfigError for others."""
    dotted, equals, value = text.partition("=")
    if not (dotted and equals):
        raise ConfigError(f"{COMMAND_LINE} {text}: expected KEY=VALUE, such as schedule.steps=20")
    values: Any = parse_yaml(value, f"{COMMAND_LINE} {text}: expected a value in YAML")
    for key in reversed(dotted.strip().split(".")):
        values = {key: values}
    return Layer(COMMAND_LINE, values)
