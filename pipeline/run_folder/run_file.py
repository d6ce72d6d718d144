"""`run.yaml` in a run's folder: the run as it was last started.

Every command takes the folder in place of the run's file.
"""

from __future__ import annotations

import difflib
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.config.sources import RUN_FILE
from pipeline.files.publishing import write_text
from pipeline.hub import source_of

_HEADER = (
    "# This run as it was last started, written by scale-cpt: its commands take this folder in "
    "place of a file.\n"
)
_logger = log.get_logger(__name__)


def write_run(config: RunConfig) -> None:
    """Writes `<folder>/run.yaml`, unless the user wrote it; logs the lines that change."""
    path = config.folder / RUN_FILE
    values = config.model_dump(mode="json", exclude_unset=True)
    # The cache's path is this user's and this machine's; the name with its commit is everybody's.
    _name_hub_model(values, "base")
    _name_hub_model(values.get("vocabulary") or {}, "folder")
    text = _HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if path.exists():
        before = path.read_text(encoding="utf-8", errors="replace")
        is_users_own = not before.startswith(_HEADER)
        if is_users_own or before == text:
            return
        _logger.info("%s: changed: %s", path, ", ".join(_changed_lines(before, text)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def write_new_run(config: RunConfig) -> None:
    """Writes `<folder>/run.yaml` if there is none.

    A stage that takes hours calls it as soon as its checks have passed, so that other commands can
    take the folder meanwhile.
    """
    if not (config.folder / RUN_FILE).exists():
        write_run(config)


def _name_hub_model(section: dict[str, Any], key: str) -> None:
    """Replaces a folder of the hub's cache by the model's name on the hub."""
    if key in section:
        section[key] = source_of(Path(section[key])) or section[key]


def _changed_lines(before: str, after: str) -> list[str]:
    """The lines that differ, with + or -."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    changed = []
    for line in islice(lines, 2, None):  # the first two name the files
        if not line.startswith("@@"):
            changed.append(" ".join(line.split()))
    return changed
