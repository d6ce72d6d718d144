"""`run.yaml` in a run's folder: the run as it was last started, which every command takes in place of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pipeline.config.reading import flattened
from pipeline.config.run import RunConfig, load_config
from pipeline.config.sources import RUN_FILE
from pipeline.errors import ConfigError, in_one_line
from pipeline.files import write_text
from pipeline.hub import source_of

_HEADER = "# This run as it was last started, written by scale-cpt: its commands take this folder in place of a file.\n"


def write_run(config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Writes `<folder>/run.yaml`, unless the user wrote the file there.

    Returns:
        Each setting that differs from the file's, by its dotted key: there, and now. Empty for the first.

    Raises:
        ConfigError: the user wrote the file, and it is no run. One of an earlier version is replaced.
    """
    path = config.folder / RUN_FILE
    changed: dict[str, tuple[Any, Any]] = {}
    if path.exists():
        own = path.read_bytes().startswith(_HEADER.encode())
        try:
            before, now = (dict(flattened(_named(run))) for run in (load_config(path, base="named"), config))
            before["folder"] = now["folder"]  # it may be spelled in other ways, or have been moved
        except ConfigError as error:
            if not own:
                raise
            before, now = {RUN_FILE: in_one_line(error)}, {RUN_FILE: "written again"}
        changed = {key: (before.get(key), now.get(key)) for key in [*before, *now] if before.get(key) != now.get(key)}
        if not changed or not own:
            return changed
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _HEADER + yaml.safe_dump(_named(config, exclude_unset=True), sort_keys=False, allow_unicode=True))
    return changed


def _named(config: RunConfig, *, exclude_unset: bool = False) -> dict[str, Any]:
    """The settings of a run as YAML has them, with models of the hub by their names."""
    values = config.model_dump(mode="json", exclude_unset=exclude_unset)
    for section, key in ((values, "base"), (values.get("vocabulary") or {}, "folder")):
        if key in section:
            section[key] = source_of(Path(section[key])) or section[key]
    return values
