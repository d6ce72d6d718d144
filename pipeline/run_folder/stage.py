"""A serial stage of a run: alone at it where it must be, and on record in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from pipeline.config.run import load_config
from pipeline.errors import exit_code_of, in_one_line
from pipeline.exit_codes import FINISHED
from pipeline.run_folder.attempts import record_end, record_stage
from pipeline.run_folder.lock import RunLock


@contextmanager
def stage_of(config: Path | None, stage: str, *, alone: bool = False) -> Iterator[None]:
    """The block is a stage of the run that `config` describes; without a `config` it is no run's.

    That it begins and how it ends is noted, unless it is started by hand (without ATTEMPT, which the scripts set): then
    it is no attempt at the run. `alone`: no other process may be at the same stage.

    Raises:
        ConfigError: the configuration does not tell where the run's folder is.
        FolderTakenError: another process is at it, and the stage takes one.
    """
    if config is None:
        yield
        return
    folder = load_config(config).folder
    recorded = _on_record(stage, folder) if "ATTEMPT" in os.environ else nullcontext()
    with recorded, RunLock(folder, stage) if alone else nullcontext():
        yield


@contextmanager
def _on_record(stage: str, folder: Path) -> Iterator[None]:
    record_stage(folder, stage)
    try:
        yield
    except Exception as error:
        code = exit_code_of(error)
        record_end(folder, stage=stage, exit_code=code, error=in_one_line(error))
        raise
    record_end(folder, stage=stage, exit_code=FINISHED)
