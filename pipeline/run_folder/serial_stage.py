"""A stage of a run that is one process, such as tokenization: its records, its lock, its run.yaml.

Training has many processes, and records its attempts itself (`pipeline.training.attempt`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from pipeline.config.run import RunConfig
from pipeline.errors import FINISHED, INTERRUPTED, exit_code_of, in_one_line
from pipeline.run_folder.attempts import record_end, record_start
from pipeline.run_folder.lock import RunLock
from pipeline.run_folder.run_file import write_new_run


@contextmanager
def serial_stage(config: RunConfig | None, stage: str, *, locked: bool = False) -> Iterator[None]:
    """Runs the block as a serial stage of a run; without `config`, as work that belongs to no run.

    The first stage of a run writes `run.yaml`, at the latest when the stage is done. Start and end
    are recorded if a script started the stage, which then has set ATTEMPT.

    Args:
        config: the run.
        stage: the name of the stage.
        locked: whether the stage takes its lock, because two processes would write the same files.

    Raises:
        FolderTakenError: another process has the lock.
        KeyboardInterrupt: Ctrl-C, once it is on record.
    """
    if config is None:
        yield
        return
    folder = config.folder
    is_recorded = "ATTEMPT" in os.environ
    if is_recorded:
        record_start(folder, stage)
    try:
        with RunLock(folder, stage) if locked else nullcontext():
            yield
            write_new_run(config)
    except KeyboardInterrupt:
        if is_recorded:
            record_end(folder, stage=stage, exit_code=INTERRUPTED)
        raise
    except Exception as error:
        if is_recorded:
            record_end(folder, stage=stage, exit_code=exit_code_of(error), error=in_one_line(error))
        raise
    if is_recorded:
        record_end(folder, stage=stage, exit_code=FINISHED)
