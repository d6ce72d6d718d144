"""A contestant in a process of its own, which makes steps when it is told to."""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from benchmarks.trainer_step.work import Side, Step, Work
from pipeline.errors import UserError
from pipeline.processes import stop_with_parent


class Contestant:
    """One side's process. Between its turns it waits without using a processor."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def turn(self, steps: int) -> list[Step]:
        """Makes some steps.

        Raises:
            UserError: the process has ended; what it says is above.
        """
        try:
            self._connection.send(steps)
            return [self._connection.recv() for _ in range(steps)]
        except (EOFError, OSError):
            raise UserError(f"{self._name} ended early; its error is above") from None


@contextmanager
def contestant(side: Side, work: Work) -> Iterator[Contestant]:
    """Starts one side's process, and ends it."""
    # Spawned: DeepSpeed and the Trainer both change what a process has imported.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=_serve, args=(there, side, work, os.getpid()), name=side, daemon=True
    )
    process.start()
    # Otherwise the end of the process would not close the pipe.
    there.close()
    try:
        yield Contestant(here, f"the process of {side}, {work.method},")
    finally:
        here.close()
        process.join(timeout=30)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(connection: Connection, side: Side, work: Work, parent: int) -> None:
    """Runs in the process of a contestant until the other end of the pipe is closed."""
    stop_with_parent(parent)
    torch.set_num_threads(work.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    begin = _turns(connection)
    if side == "theirs":
        from benchmarks.trainer_step import theirs

        theirs.train(work, begin, connection.send)
        return
    from benchmarks.trainer_step import ours

    step = ours.stepper(work)
    while begin():
        connection.send(step())
    torch.distributed.destroy_process_group()


def _turns(connection: Connection) -> Callable[[], bool]:
    """Waits for the next turn where the last one has no step left; false at the end."""
    left = 0

    def begin() -> bool:
        nonlocal left
        if left == 0:
            try:
                left = connection.recv()
            except EOFError:
                return False
        left -= 1
        return True

    return begin
