"""One attempt at a run: alone in its folder, and on record there, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from pipeline.errors import exit_code_of, in_one_line
from pipeline.run_folder.attempts import record_end
from pipeline.run_folder.lock import RunLock
from pipeline.training.phases import Phases
from pipeline.training.roll_call import Verdict
from pipeline.training.unison import from_first_rank


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other job works in `folder` during the block; every rank must enter it.

    Raises:
        FolderTakenError: another one does.
    """
    lock = RunLock(folder)  # the first rank's holds it for all
    from_first_rank(lambda: lock.__enter__() and None)
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            lock.__exit__(None, None, None)


def on_record(folder: Path, phases: Phases, work: Callable[[], int]) -> int:
    """Calls `work`, notes in `folder` how it ended, and returns its exit code.

    A fault is noted by the rank that met it. Those that only heard of it leave by SystemExit.
    """
    try:
        code = work()
    except Exception as error:
        record_end(
            folder,
            exit_code=exit_code_of(error),
            step=phases.place.step,
            error=in_one_line(error),
        )
        raise
    if dist.get_rank() == 0:
        record_end(folder, exit_code=code, step=phases.place.step)
    return code


def record_verdict(folder: Path, phases: Phases, verdict: Verdict) -> None:
    """Notes in `folder` why the ranks gave up."""
    record_end(folder, exit_code=verdict.exit_code, step=phases.place.step, error=verdict.text)
