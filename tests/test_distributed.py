"""`run_ranks`: results in rank order, failures reported, no process left running."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks
from tests.waiting import PATIENCE_S


def gather_squares(offset):
    own = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(own)
    return dist.get_rank(), os.getpid(), own


def raise_on_one(rank):
    if dist.get_rank() == rank:
        raise ValueError("one rank's own fault")
    dist.barrier()


def die_on_one(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep():
    time.sleep(PATIENCE_S)


def test_results_are_in_rank_order_and_the_processes_have_ended():
    results = run_ranks(gather_squares, 3, 1)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert all(total == torch.tensor([6.0]) for _, _, total in results)
    for _, pid, _ in results:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_traceback_of_a_rank_is_reported():
    with pytest.raises(RankError, match=r"(?s)^rank 1 raised.*one rank's own fault"):
        run_ranks(raise_on_one, 2, 1)


def test_a_killed_rank_is_reported():
    with pytest.raises(RankError, match=r"rank 0 died without a result"):
        run_ranks(die_on_one, 2, 0)


def test_hanging_ranks_are_killed():
    begin = time.monotonic()
    with pytest.raises(RankError, match="did not end in time"):
        run_ranks(sleep, 2, timeout_s=1)
    assert time.monotonic() - begin < PATIENCE_S / 2
