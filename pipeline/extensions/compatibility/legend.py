"""What each feature is in a run's configuration, and how a table is written. Nothing here waits for
torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.extensions.compatibility.features import METHODS, OTHERS, SETTINGS


def legend() -> Iterator[str]:
    """What each feature is in a run's configuration."""
    yield "## Features"
    yield ""
    yield from table_head("feature", ["settings"])
    for name, feature in {**METHODS, **SETTINGS, **OTHERS}.items():
        shown = [_setting(path, value) for path, value in feature.settings.items()]
        if shown:
            yield f"| {name} | {', '.join(shown)} |"


def table_head(first: str, columns: Sequence[str]) -> Iterator[str]:
    yield table_row([first] if first else [], columns)
    yield "|---" * (len(columns) + 1) + "|"


def table_row(names: Sequence[str], cells: Sequence[str]) -> str:
    name = ", ".join(names)
    return f"|{f' {name} ' if name else ' '}| {' | '.join(cells)} |"


def _setting(path: str, value: object) -> str:
    """A setting as a table shows it: with its value, if that is a word or a number."""
    if path == "method" and isinstance(value, Mapping):
        return f"`method.{'variant' if 'variant' in value else 'name'}: " + (
            f"{value.get('variant', value['name'])}`"
        )
    if isinstance(value, Mapping | list):
        return f"`{path}`"
    return f"`{path}: {str(value).lower() if isinstance(value, bool) else value}`"
