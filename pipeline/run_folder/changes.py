"""A run as a command names it: `--config FILE`, changed by `--set KEY=VALUE` and by what earlier commands set.

Changes of a command that works on a run are recorded in the run's folder. They hold for every later command on that
folder, so that a run that is resumed, converted or evaluated without `--set` is the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipeline import log
from pipeline.config.run import HubModels, RunConfig, parse_config, with_models
from pipeline.config.sources import COMMAND_LINE, Layer, combined, layer_of, parse_changes, read_layers
from pipeline.errors import RunFolderError, UserError
from pipeline.files import read_record, write_record

NAME = "changes.json"
_ADVICE = "remove it, and give the changes again with --set"
_logger = log.get_logger(__name__)


class Changes(BaseModel):
    """What `--set` has changed in a run, as text by dotted keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    changes: dict[str, str]


def add_set_option(parser: argparse._ActionsContainer) -> None:
    """Adds `--set`, which `read_run` takes."""
    parser.add_argument(
        COMMAND_LINE,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of the configuration, such as schedule.steps=20; may be repeated, and is remembered in "
        "the run's folder",
    )


def read_run(path: Path, changes: Sequence[str] = (), *, base: HubModels = "whole") -> RunConfig:
    """The run that the YAML file at `path`, its folder's record and the `changes` of this command describe.

    Raises:
        ConfigError: the file does not describe a run, or a change is none of its settings.
        RunFolderError: the record is damaged.
    """
    return with_models(parse_config(combined(read_sources(path, changes)), source=_source(path, changes)), base)


def read_sources(path: Path, changes: Sequence[str] = ()) -> list[Layer]:
    """The layers of that run: the files, the record in its folder, and `changes`. Raises as `read_run`."""
    layers = [*read_layers(path), layer_of(RunConfig, own := parse_changes(changes))]
    folder = Path(str(combined(layers).get("folder", "")))  # not checked yet: the record may hold what is missing
    earlier = {key: value for key, value in recorded_changes(folder).items() if key not in own}
    if earlier:
        record = str(folder / NAME)
        given = ", ".join(f"{key}={value}" for key, value in earlier.items())
        _logger.info(
            "%s, from an earlier --set, overrides the YAML file: %s (remove the record to drop them)", record, given
        )
        # A section that was set as a whole comes before what was set in it later.
        for depth in sorted({key.count(".") for key in earlier}):
            at_depth = {key: value for key, value in earlier.items() if key.count(".") == depth}
            layers.insert(-1, layer_of(RunConfig, at_depth, record))
    return layers


def recorded_changes(folder: Path) -> dict[str, str]:
    """What earlier commands have changed in the run in `folder`.

    Raises:
        RunFolderError: the record is damaged.
    """
    if folder == Path() or not folder.is_dir():  # which other checks report if it is a file
        return {}
    try:
        return read_record(folder / NAME, Changes, RunFolderError, _ADVICE).changes
    except FileNotFoundError:
        return {}


@contextmanager
def changes_on_record(folder: Path, changes: Sequence[str]) -> Iterator[None]:
    """Adds `changes` to the record in `folder` during the block and after it, unless it ends in a user's fault.

    The run's folder is not recorded: it would be another one's after a move.
    """
    before = recorded_changes(folder)
    new = {key: value for key, value in parse_changes(changes).items() if key != "folder"}
    replaced = tuple(f"{key}." for key in new)
    after = {key: value for key, value in before.items() if not key.startswith(replaced)} | new
    if after == before:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / NAME, Changes(changes=after))
    try:
        yield
    except UserError:  # such as another expansion than the one that the run was trained with
        if before:
            write_record(folder / NAME, Changes(changes=before))
        else:
            (folder / NAME).unlink(missing_ok=True)  # several jobs of one stage may fail
        raise


def _source(path: Path, changes: Sequence[str]) -> str:
    return " ".join([str(path), *(f"{COMMAND_LINE} {change}" for change in changes)])
