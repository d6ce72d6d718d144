"""The helper that the multi-process tests stand on: results in order, failures heard, nothing left running."""

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


def test_results_come_in_rank_order_from_processes_that_have_ended():
    results = run_ranks(gather_squares, 3, 1)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert all(total == torch.tensor([6.0]) for _, _, total in results)
    for _, pid, _ in results:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_raises_ends_the_test_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)^rank 1 raised.*one rank's own fault"):
        run_ranks(raise_on_one, 2, 1)


def test_a_rank_that_is_killed_ends_the_test():
    with pytest.raises(RankError, match=r"rank 0 died without a word"):
        run_ranks(die_on_one, 2, 0)


def test_ranks_that_hang_are_ended_in_time():
    begin = time.monotonic()
    with pytest.raises(RankError, match="did not end in time"):
        run_ranks(sleep, 2, timeout_s=1)
    assert time.monotonic() - begin < PATIENCE_S / 2
