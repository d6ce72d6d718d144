"""Pools of workers, each of which takes the next task when it is free: processes of this machine, or MPI ranks."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

from pipeline.errors import DataError, LayoutError

Task = TypeVar("Task")
Result = TypeVar("Result")
_number = 0
_board: Any = None
_PR_SET_PDEATHSIG = 1


class Workers:
    """Runs functions over tasks, on an Executor of concurrent.futures or mpi4py; with None, in this process.

    `board`: what each of the executor's processes works on, see `_on_board`.
    """

    def __init__(self, executor: Any, board: Any = None) -> None:  # noqa: ANN401
        self._executor = executor
        self._board = board

    def run(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        *,
        name: Callable[[Task], object] = str,
    ) -> Iterator[Result]:
        """Yields `function(task)` for every task, in the order in which they finish; `name` is for messages.

        Raises:
            DataError: a worker died; the message names its task.
        """
        if self._executor is None:
            yield from map(function, tasks)
            return
        tasks = list(tasks)
        futures: dict[Any, Task] = {}
        processes: list[Any] = []
        try:
            for at, task in enumerate(tasks):
                call = function if self._board is None else partial(_on_board, at, function)
                futures[self._executor.submit(call, task)] = task
            processes = multiprocessing.active_children()
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise DataError(self._death(processes, [str(name(task)) for task in tasks])) from None
        finally:
            for future in futures:
                future.cancel()

    def _death(self, processes: Iterable[Any], names: Sequence[str]) -> str:
        """Which process died, of what and at which task, in one line."""
        self._executor.shutdown()  # ends the other processes, with SIGTERM
        task_of = dict(zip(self._board[::2], self._board[1::2], strict=True))
        codes = {process.pid: process.exitcode for process in processes if process.exitcode}
        dead = [pid for pid, code in codes.items() if code != -signal.SIGTERM] or list(codes)
        at_work = [f"{names[task]} ({_cause(codes[pid])})" for pid in dead if (task := task_of.get(pid, -1)) >= 0]
        where = f" at {', '.join(at_work)}" if at_work else ""
        return (
            f"a worker process was killed{where}; start the same command again, with fewer --workers if memory was "
            f"short, and without the file if it is damaged: finished work is kept"
        )


def _cause(exit_code: int) -> str:
    return f"{signal.strsignal(-exit_code)}, signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


@contextlib.contextmanager
def local_workers(count: int, *, preload: str = "pipeline.data.unit_work", isolated: bool = False) -> Iterator[Workers]:
    """`count` processes of this machine, which import the module `preload` once; a single worker is this process.

    `isolated`: a single worker is another process, too: what a file makes a library do does not end this one.
    """
    if count == 1 and not isolated:
        yield Workers(None)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.data.fork_server", preload])
    started = context.Value("i", 0)
    board = context.RawArray("q", [-1] * (2 * count))
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin_work, initargs=(started, board)) as executor:
        executor.submit(os.getpid)  # starts the fork server, which imports while the caller prepares
        yield Workers(executor, board)


@contextlib.contextmanager
def mpi_workers() -> Iterator[Workers | None]:
    """The ranks of an MPI job: rank 0 distributes the tasks; the others do them and get None when all are done.

    Raises:
        LayoutError: the world is smaller than Slurm's allocation, as it is without an MPI launcher.
    """
    from mpi4py import MPI  # the import starts MPI
    from mpi4py.futures import MPICommExecutor

    world = MPI.COMM_WORLD
    expected = int(os.environ.get("SLURM_NTASKS", "1"))
    if world.size < expected:
        raise LayoutError(
            f"--mpi: expected {expected} ranks, as Slurm allocated, found {world.size}; "
            "start it with `srun --mpi=pmix` or `mpirun`"
        )
    if world.size == 1:
        yield Workers(None)
        return
    with MPICommExecutor(world, root=0) as executor:
        yield None if executor is None else Workers(executor)


def worker_number() -> int:
    """This process's number among its pool's `local_workers`, from 0."""
    return _number


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that forked it ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _begin_work(started: Any, board: Any) -> None:  # noqa: ANN401
    """Numbers a worker, makes it end with its parent, and leaves Ctrl-C to the parent."""
    global _number, _board
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with started.get_lock():
        _number = started.value
        started.value += 1
    _board = board
    _board[2 * _number] = os.getpid()


def _on_board(at: int, function: Callable[[Task], Result], task: Task) -> Result:
    """Calls `function`; until it ends, the board shows the number `at` of its task behind this process's id."""
    _board[2 * _number + 1] = at
    try:
        return function(task)
    finally:
        _board[2 * _number + 1] = -1
