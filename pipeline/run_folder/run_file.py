"""`run.yaml` in a run's folder: the run as it was last started, which every command takes in place
of its file.
"""

from __future__ import annotations

import difflib
from itertools import islice
from pathlib import Path

import yaml

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.config.sources import RUN_FILE
from pipeline.files import write_text
from pipeline.hub import source_of

_HEADER = "# This run as it was last started, written by scale-cpt: its commands take this folder in place of a file.\n"
_logger = log.get_logger(__name__)


def write_run(config: RunConfig) -> None:
    """Writes `<folder>/run.yaml`, unless the user wrote the file there; logs the lines that
    change.
    """
    path = config.folder / RUN_FILE
    values = config.model_dump(mode="json", exclude_unset=True)
    for section, key in ((values, "base"), (values.get("vocabulary") or {}, "folder")):
        if key in section:  # models of the hub by their names
            section[key] = source_of(Path(section[key])) or section[key]
    text = _HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if path.exists():
        before = path.read_text(encoding="utf-8", errors="replace")
        if before == text or not before.startswith(_HEADER):
            return
        lines = difflib.unified_diff(before.splitlines(), text.splitlines(), n=0, lineterm="")
        changed = [
            " ".join(line.split()) for line in islice(lines, 2, None) if not line.startswith("@@")
        ]
        _logger.info("%s: changed: %s", path, ", ".join(changed))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
