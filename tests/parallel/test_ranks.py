"""A fault on one rank ends all of them, and is told once."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.distributed as dist

from pipeline.errors import DataError
from pipeline.health.watchdog import innermost
from pipeline.parallel.ranks import run_on_all_ranks, summed
from tests.distributed import run_ranks
from tests.waiting import wait_until


def _outcome(failing: tuple[int, ...]) -> str:
    def work() -> int:
        if dist.get_rank() in failing:
            raise DataError(f"corpus {dist.get_rank()}")
        return dist.get_rank()

    try:
        return str(run_on_all_ranks(work))
    except DataError as error:
        return f"error: {error}"
    except SystemExit as end:
        return f"silent exit {end.code}"


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((), ["0", "1", "2"]),
        ((0, 1, 2), ["error: corpus 0", "silent exit 1", "silent exit 1"]),
    ],
)
def test_all_go_on_or_all_stop(failing, expected):
    assert run_ranks(_outcome, 3, failing) == expected


def test_a_fault_of_one_rank_names_it():
    first, second, third = run_ranks(_outcome, 3, (1,))
    assert first == third == "silent exit 1"
    assert second.startswith("error: rank 1 on ")
    assert second.endswith(": corpus 1")


def _sums() -> tuple[list[float], list[float]]:
    values = torch.tensor([1.0, float(dist.get_rank())])
    return summed(values).tolist(), values.tolist()


def test_sums_are_of_all_ranks():
    assert run_ranks(_sums, 3) == [([3.0, 3.0], [3.0, 3.0])] * 3


def _place_while_others_come() -> tuple[str, bool]:
    values, come = torch.ones(1), threading.Lock()
    come.acquire()
    values.cpu = come.acquire  # as a GPU's: a call into C that returns when the others have come
    waiter = threading.Thread(target=summed, args=(values,))
    waiter.start()

    def place() -> tuple[str, bool]:
        return innermost(sys._current_frames().get(waiter.ident))

    found = wait_until(lambda: place()[0].startswith("summed"), every_s=0.01)
    where, waits = place()
    come.release()
    waiter.join()
    return (where if found else "elsewhere"), waits


def test_a_wait_for_a_gpu_is_a_wait_for_the_others():
    (place,) = run_ranks(_place_while_others_come, 1)
    assert place[0].startswith("summed (ranks.py:") and place[1]
