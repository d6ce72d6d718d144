"""Where the values of a configuration come from: files that its file extends, its file, and --set.

A run's folder stands for the file `run.yaml` in it, which the run's first stage wrote.

Each of these changes the ones before it, key by key:

    a section           merged with the one before, unless its key `name` is another
    null for a section  removes it
    any other value     replaces the one before; so does a list, as a whole

`--set` changes one item of a list by its number, from 0, or by its `name`: stages.0.steps=6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.reading import STILL_READ_KEYS, parse_yaml, read_yaml
from pipeline.errors import ConfigError

EXTENDS = "extends"
COMMAND_LINE = "--set"
RUN_FILE = "run.yaml"
"""In a run's folder: all settings of the run, with those of extended files and of --set."""
CHECKPOINTS = "checkpoints"
"""In a run's folder: the folder of its checkpoints."""
_SECTIONS_WITH_EARLIER_NAMES = ("method", "learning_rate_factors", "weight_decay_factors")


def read_settings(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The settings in the YAML file or the run's folder `path`, with `changes` such as `seed=7`.

    A relative path in `extends` counts from the file that has it. A run's folder may have been
    moved, with the folders in it.

    Raises:
        ConfigError: one of the files is missing, is not YAML or extends itself, or a change is no
            KEY=VALUE.
    """
    if path.is_dir():
        values = _run_folder_settings(path)
    else:
        values = _extended(path, ())
    for change in changes:
        values = merged(values, _change_of(change, values))
    return values


def _run_folder_settings(folder: Path) -> dict[str, Any]:
    """The settings in a run's folder. If it was moved, so are the folders in it."""
    values = _extended(folder / RUN_FILE, ())
    old = Path(str(values.get("folder")))
    # run.yaml holds the paths of the run's first start. If its folder was moved or copied since,
    # they would lead to the old place.
    if old.resolve() == folder.resolve():
        return values
    return merged(values, {**_moved(values, old, folder), "folder": str(folder)})


def _extended(path: Path, outer: tuple[Path, ...]) -> dict[str, Any]:
    """The settings of a file, with those of the files that it extends.

    Raises:
        ConfigError: the file cannot be read, or is one of the files `outer`, which extend it.
    """
    # Resolved paths: a file may extend itself by another spelling of its path, or through a link.
    if path.resolve() in outer:
        raise ConfigError(
            f"{path}: this file is extended already; remove one of the keys {EXTENDS}"
        )
    values = read_yaml(path)
    parent = values.pop(EXTENDS, None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise ConfigError(
            f"{path}: {EXTENDS}: expected the path of one YAML file, found {parent!r}"
        )
    try:
        return merged(_extended(path.parent / parent, (*outer, path.resolve())), values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {EXTENDS}: {error}") from None


def _moved(values: Mapping[str, Any], old: Path, new: Path) -> dict[str, Any]:
    """The folders among `values` that lay in the folder `old`, in `new`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = _moved(value, old, new)
            if inner:
                found[key] = inner
        elif key in ("folder", "init_expansion") and value and Path(str(value)).is_relative_to(old):
            found[key] = str(new / Path(str(value)).relative_to(old))
    return found


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `changes`, section by section."""
    result = dict(settings)
    for key, value in changes.items():
        before = result.get(key)
        if isinstance(before, Mapping) and value is None:
            del result[key]
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            # A section with another `name`, such as another method, has other keys: it is replaced.
            is_same_kind = value.get("name") in (None, before.get("name"))
            if key in _SECTIONS_WITH_EARLIER_NAMES:
                before = _named_as_in(value, before)
            result[key] = merged(before, value) if is_same_kind else value
        else:
            result[key] = value
    return result


def _named_as_in(changes: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, where a setting has the other of its two names in `changes`, with that name.

    One source may have its earlier name, and the next one, which changes it, today's. The order of
    the settings stays: of factors that match a parameter, the last one counts.
    """
    other_names = dict(STILL_READ_KEYS)
    for earlier, today in STILL_READ_KEYS.items():
        other_names[today] = earlier
    renamed: dict[str, Any] = {}
    for name, value in settings.items():
        other = other_names.get(name)
        if other is not None and other in changes and name not in changes:
            renamed[other] = value
        else:
            renamed[name] = value
    return renamed


def _change_of(text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What an argument such as `schedule.steps=20` changes in `settings`; its value is YAML."""
    dotted, equals, value = text.partition("=")
    if not (dotted and equals):
        raise ConfigError(f"{COMMAND_LINE} {text}: expected KEY=VALUE, such as schedule.steps=20")
    # As YAML, so that numbers, lists and null have the types that they have in a file.
    parsed: Any = parse_yaml(value, f"{COMMAND_LINE} {text}: expected a value in YAML")
    return _nested(dotted.strip().split("."), parsed, settings, text)


def _nested(keys: Sequence[str], value: Any, settings: Any, text: str) -> dict[str, Any]:
    """`value` under its keys, for `merged`. A list among `settings` is whole, one item changed."""
    key, *rest = keys
    before = settings.get(key) if isinstance(settings, Mapping) else None
    if not rest:
        return {key: value}
    if isinstance(before, list):
        return {key: _with_item(before, rest, value, text)}
    return {key: _nested(rest, value, before, text)}


def _with_item(items: Sequence[Any], keys: Sequence[str], value: Any, text: str) -> list[Any]:
    """A list with one item changed: `keys` are its number or name, and what is changed of it."""
    key, *rest = keys
    changed = list(items)
    numbers = [str(number) for number in range(len(items))]
    names = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    if key in numbers:
        number = int(key)
    elif key in names:
        number = names.index(key)
    else:
        known = ", ".join([*numbers, *filter(None, names)]) or "none, as the list is empty"
        raise ConfigError(f"{COMMAND_LINE} {text}: found no item {key}; expected one of {known}")
    if not rest:
        changed[number] = value
    elif isinstance(items[number], Mapping):
        changed[number] = merged(items[number], _nested(rest, value, items[number], text))
    else:
        raise ConfigError(f"{COMMAND_LINE} {text}: item {key} is no section, and has no {rest[0]}")
    return changed
