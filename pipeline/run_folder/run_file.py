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
from pipeline.config.reading import flattened
from pipeline.config.run import RunConfig, load_config
from pipeline.config.sources import RUN_FILE
from pipeline.errors import ConfigError
from pipeline.files.publishing import write_text
from pipeline.hub import source_of
from pipeline.run_folder.checkpoint_names import newest_checkpoint_step

_HEADER = (
    "# This run as it was last started, written by scale-cpt: its commands take this folder in "
    "place of a file.\n"
)
_logger = log.get_logger(__name__)


def write_run(config: RunConfig) -> tuple[str, ...]:
    """Writes `<folder>/run.yaml`, unless the user wrote it; logs and returns the changed lines."""
    path = config.folder / RUN_FILE
    values = config.model_dump(mode="json", exclude_unset=True)
    # The cache's path is this user's and this machine's; the name with its commit is everybody's.
    _name_hub_model(values, "base")
    _name_hub_model(values.get("vocabulary") or {}, "folder")
    text = _HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    changed: tuple[str, ...] = ()
    if path.exists():
        before = path.read_text(encoding="utf-8", errors="replace")
        is_users_own = not before.startswith(_HEADER)
        if is_users_own or before == text:
            return ()
        changed = tuple(_changed_lines(before, text))
        _logger.info("%s: changed: %s", path, ", ".join(changed))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return changed


def write_new_run(config: RunConfig) -> None:
    """Writes `<folder>/run.yaml` if there is none.

    A stage that takes hours calls it as soon as its checks have passed, so that other commands can
    take the folder meanwhile.
    """
    if not (config.folder / RUN_FILE).exists():
        write_run(config)


def write_gate(config: RunConfig) -> None:
    """Writes the section `gate` of `<folder>/run.yaml`; the others stay as training used them.

    A warning names the settings in which `config` differs from the record.
    """
    try:
        recorded = load_config(config.folder)
    except ConfigError:
        # There is no record, or only one of an earlier version.
        write_run(config)
        return
    with_gate = recorded.model_copy(update={"gate": config.gate})
    differing = _differing_settings(with_gate, config)
    if differing:
        _logger.warning(
            "%s keeps what training used; this command was given other settings: %s",
            config.folder / RUN_FILE,
            ", ".join(differing),
        )
    write_run(with_gate)


def goes_on_otherwise(config: RunConfig) -> bool:
    """Whether a run that has begun to train was last started with other settings than `config`."""
    if newest_checkpoint_step(config.folder) == 0:
        return False
    try:
        recorded = load_config(config.folder)
    except ConfigError:
        return False
    return bool(_differing_settings(recorded, config))


def _differing_settings(recorded: RunConfig, config: RunConfig) -> list[str]:
    """The dotted names of settings that differ, with the recorded value and the new one."""
    before = dict(flattened(recorded.model_dump(mode="json")))
    after = dict(flattened(config.model_dump(mode="json")))
    differing = []
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            differing.append(f"{name} {after.get(name)} (recorded: {before.get(name)})")
    return differing


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
