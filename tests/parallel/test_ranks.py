"""An error on one rank stops all ranks, and is reported once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipeline.errors import DataError
from pipeline.health.watchdog import innermost
from pipeline.parallel.ranks import all_gathered, broadcast_from_rank0, run_on_all_ranks, summed
from tests.distributed import run_ranks
from tests.waiting import wait_until


def _outcome(together: Callable[[Callable[[], str]], str], failing: tuple[int, ...]) -> str:
    def work() -> str:
        if dist.get_rank() in failing:
            raise DataError(f"corpus {dist.get_rank()}")
        return f"rank {dist.get_rank()}"

    try:
        return together(work)
    except DataError as error:
        return f"error: {error}"
    except SystemExit as end:
        return f"exit {end.code}"


def _outcomes() -> dict[str, Any]:
    values = torch.tensor([1.0, float(dist.get_rank())])
    return {
        "none": _outcome(run_on_all_ranks, ()),
        "all": _outcome(run_on_all_ranks, (0, 1, 2)),
        "rank 1": _outcome(run_on_all_ranks, (1,)),
        "broadcast": _outcome(broadcast_from_rank0, (1, 2)),
        "broadcast of a fault": _outcome(broadcast_from_rank0, (0,)),
        "gathered": all_gathered(dist.get_rank()),
        "summed": summed(values).tolist(),
        "in place": values.tolist(),
    }


def test_all_continue_or_all_stop_and_the_fault_of_one_rank_names_it():
    ranks = run_ranks(_outcomes, 3)
    outcomes = {case: [rank[case] for rank in ranks] for case in ranks[0]}
    assert outcomes["none"] == ["rank 0", "rank 1", "rank 2"]
    assert outcomes["all"] == ["error: corpus 0", "exit 1", "exit 1"]
    first, second, third = outcomes["rank 1"]
    assert first == third == "exit 1"
    assert second.startswith("error: rank 1 on ") and second.endswith(": corpus 1")
    assert outcomes["broadcast"] == ["rank 0"] * 3
    assert outcomes["broadcast of a fault"] == ["error: corpus 0", "exit 1", "exit 1"]
    assert outcomes["gathered"] == [[0, 1, 2]] * 3
    assert outcomes["summed"] == outcomes["in place"] == [[3.0, 3.0]] * 3


def _place_while_waiting() -> tuple[str, bool]:
    values, arrived = torch.ones(1), threading.Lock()
    arrived.acquire()
    values.cpu = (
        arrived.acquire
    )  # like a GPU's: a call into C that returns when the other ranks have arrived
    waiter = threading.Thread(target=summed, args=(values,))
    waiter.start()

    def place() -> tuple[str, bool]:
        return innermost(sys._current_frames().get(waiter.ident))

    found = wait_until(lambda: place()[0].startswith("summed"), every_s=0.01)
    where, waits = place()
    arrived.release()
    waiter.join()
    return (where if found else "elsewhere"), waits


def test_a_wait_for_a_gpu_counts_as_waiting_for_other_ranks():
    (place,) = run_ranks(_place_while_waiting, 1)
    assert place[0].startswith("summed (ranks.py:") and place[1]
