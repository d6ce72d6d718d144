"""A pool of processes, each of which takes the next task when it is free; and the share of an MPI
rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import TypeVar

from pipeline.errors import DataError, LayoutError, MissingPackageError

_OF_TRACKER = "ignore:resource_tracker:UserWarning"
Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """Runs functions over tasks, on the `count` processes of a pool, or without one in this
    process."""

    def __init__(self, pool: ProcessPoolExecutor | None, count: int = 1) -> None:
        self._pool = pool
        self._count = count

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yields `function(task)` for every task, in the order in which they finish.

        Raises:
            DataError: a worker died; the message names the tasks that may have been its own.
        """
        if self._pool is None:
            yield from map(function, tasks)
            return
        futures: dict[Future[Result], Task] = {}
        try:
            for task in tasks:
                futures[self._pool.submit(function, task)] = task
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            unfinished: list[Task] = []
            for future, task in futures.items():
                if not future.done() or future.exception() is not None:
                    unfinished.append(task)
            # Tasks begin in their order, so the dead worker had one of the first.
            at_work = " or ".join(map(str, unfinished[: self._count]))
            raise DataError(
                f"a worker process was killed at {at_work}; start the same command again, with "
                "fewer --workers if memory was short, and without the file if it is damaged: "
                "finished work is kept"
            ) from None
        finally:
            # After a fault, or where the caller wants no more, no further task is begun.
            for future in futures:
                future.cancel()


@contextlib.contextmanager
def local_workers(
    count: int, *, preload: str = "pipeline.data.tokenize.job", isolated: bool = False
) -> Iterator[Workers]:
    """`count` processes of this machine, which import the module `preload` once; a single worker is
    this process.

    `isolated`: a single worker is another process, too: what a file makes a library do does not end
    this one.
    """
    if count == 1 and not isolated:
        yield Workers(None)
        return
    _start_silent_tracker()
    # A fork of this process would copy locks that threads of libraries hold here.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin_work) as pool:
        # Starts the fork server now, which imports `preload` while the caller prepares.
        pool.submit(os.getpid)
        yield Workers(pool, count)


def _start_silent_tracker() -> None:
    """Starts the process that removes semaphores after a kill, without the warning that it would
    print then.

    It outlives all others: its warning would come on a terminal, or in a log, where another command
    already runs.
    """
    # New processes of multiprocessing get these options as -W.
    sys.warnoptions.append(_OF_TRACKER)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(_OF_TRACKER)


def mpi_share() -> tuple[int, int]:
    """This process's rank in its MPI job, and the number of ranks.

    Raises:
        MissingPackageError: this machine has no MPI.
        LayoutError: there are fewer ranks than Slurm allocated, as without a launcher.
    """
    try:
        from mpi4py import MPI  # the import starts MPI
    except (ImportError, RuntimeError) as error:
        # RuntimeError: mpi4py is installed, and finds no library of MPI.
        reason = str(error).partition("\n")[0]
        raise MissingPackageError(
            f"--mpi: this machine has no MPI ({reason}); install Open MPI and mpi4py, load their "
            "module, or use a job array, which needs neither"
        ) from None

    rank = MPI.COMM_WORLD.rank
    size = MPI.COMM_WORLD.size
    # Without a launcher each process is a world of its own, and all would be rank 0.
    expected = int(os.environ.get("SLURM_NTASKS", "1"))
    if size < expected:
        raise LayoutError(
            f"--mpi: expected {expected} ranks, as Slurm allocated, found {size}; "
            "start it with `srun --mpi=pmix` or `mpirun`"
        )
    return rank, size


def worker_number() -> int:
    """A number of this process, consecutive among the workers of a pool."""
    _, _, number = multiprocessing.current_process().name.rpartition("-")
    return int(number) if number.isdecimal() else 0


def _begin_work() -> None:
    """Makes a worker end with its parent, and leaves Ctrl-C to the parent."""
    # Ctrl-C reaches the whole group of processes: the parent alone ends the work, and prints one
    # line.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Waits for the process that made the pool; its death, even by SIGKILL, ends this one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    # At once: nobody waits for its results, and the main thread may be within a library.
    os._exit(1)
