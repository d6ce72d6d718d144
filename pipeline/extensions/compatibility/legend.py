"""What each feature is in a run's configuration, and how a table is written. Nothing here waits for
torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.extensions.compatibility.features import METHODS, OTHERS, SETTINGS, Feature

_CHOSEN: Mapping[str, Feature] = {**METHODS, **SETTINGS, **OTHERS}


def legend() -> Iterator[str]:
    """What each feature is in a run's configuration."""
    yield "## Features"
    yield ""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, feature in _CHOSEN.items():
        if feature.settings:
            groups.setdefault(_paths(feature), []).append(name)
    for paths, names in groups.items():
        if len(names) > 1:  # the values of one setting
            cells = [f"`{path}`" for path in paths]
        else:
            settings = _CHOSEN[names[0]].settings
            cells = [_setting(path, value) for path, value in settings.items()]
        yield f"- {', '.join(names)}: {', '.join(cells)}"


def table_head(first: str, columns: Sequence[str]) -> Iterator[str]:
    yield table_row([first] if first else [], columns)
    yield "|---" * (len(columns) + 1) + "|"


def table_row(names: Sequence[str], cells: Sequence[str]) -> str:
    name = ", ".join(names)
    return f"|{f' {name} ' if name else ' '}| {' | '.join(cells)} |"


def _paths(feature: Feature) -> tuple[str, ...]:
    """The settings that ask for a feature, without their values."""
    paths: list[str] = []
    for path, value in feature.settings.items():
        is_method = path == "method"
        paths.append(f"method.{_kind(value)}" if is_method else path)
    return tuple(paths)


def _kind(method: Mapping[str, object]) -> str:
    """The setting by which a method is told from the others: SCALE's variants share a name."""
    return "variant" if "variant" in method else "name"


def _setting(path: str, value: object) -> str:
    """A setting as a table shows it: with its value, if that is a word or a number."""
    if isinstance(value, Mapping | list):
        return f"`{path}`"
    return f"`{path}: {str(value).lower() if isinstance(value, bool) else value}`"
