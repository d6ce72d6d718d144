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
from typing import Any, Literal, NamedTuple, get_origin

from pipeline.config.reading import known_keys, parse_yaml, read_yaml, types_at
from pipeline.errors import ConfigError, nearest

EXTENDS = "extends"
COMMAND_LINE = "--set"
RUN_FILE = "run.yaml"
"""In a run's folder: the run with all that its file extends, and with --set."""
Change = Mapping[str, str]
"""Settings as text, by their dotted keys."""


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
        elif isinstance(before, Mapping) and isinstance(value, Mapping) and _same_kind(before, value):
            result[key] = merged(before, value)
        else:
            result[key] = value
    return result


def _same_kind(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return "name" not in after or after["name"] == before.get("name")


def source_of(layers: Sequence[Layer], keys: Sequence[str]) -> str | None:
    """The origin of the value under `keys` in the combined settings; None: no layer has it, so it is the default."""
    return next((layer.source for layer in reversed(layers) if _has(layer.values, keys)), None)


def _has(values: Any, keys: Sequence[str]) -> bool:  # noqa: ANN401
    for key in keys:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True


def parse_changes(texts: Iterable[str]) -> Change:
    """Arguments such as `schedule.steps=20`; the last one of a key holds.

    Raises:
        ConfigError: one has another form.
    """
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"{COMMAND_LINE} {text}: expected KEY=VALUE, such as schedule.steps=20")
        changes[key.strip()] = value.strip()
    return changes


def layer_of(kind: type, changes: Change, source: str = COMMAND_LINE) -> Layer:
    """A layer of `changes` to a section of the class `kind`, each of the type that its key has there.

    Raises:
        ConfigError: a key is unknown, or a value is no YAML.
    """
    values: dict[str, Any] = {}
    for dotted, text in changes.items():
        section = values
        *outer, last = keys = dotted.split(".")
        for depth, key in enumerate(keys):
            kinds = types_at([kind], keys[:depth])
            if not types_at(kinds, [key]):
                raise ConfigError(
                    f"{source} {dotted}: {'.'.join(keys[: depth + 1])}: unknown key{nearest(key, known_keys(kinds))}; "
                    "docs/configuration.md lists every setting"
                )
        for key in outer:
            inner = section.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{source} {dotted}: {key} is set as a whole too; give one of them")
            section = inner
        section[last] = _typed(types_at([kind], keys), text, f"{source} {dotted}={text}: expected a value in YAML")
    return Layer(source, values)


def _typed(kinds: Sequence[Any], text: str, fault: str) -> Any:  # noqa: ANN401
    if text == "null":
        return None
    if all(kind in (str, Path) or get_origin(kind) is Literal for kind in kinds):
        return text
    value = parse_yaml(text, fault)
    listed = any(get_origin(kind) in (list, tuple) for kind in kinds)
    return [value] if listed and not isinstance(value, list) else value
