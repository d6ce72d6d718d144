"""`run_ranks`: results in rank order, failures reported, no process left running."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks


def gather_squares(offset):
    own = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(own)
    return dist.get_rank(), os.getpid(), own


def raises():
    if dist.get_rank() == 1:
        raise ValueError("one rank's own fault")
    dist.barrier()


def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_are_in_rank_order_and_the_processes_have_ended():
    results = run_ranks(gather_squares, 3, 1)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert all(total == torch.tensor([6.0]) for _, _, total in results)
    for _, pid, _ in results:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("fault", "report"),
    [(raises, r"(?s)^rank 1 raised.*one rank's own fault"), (dies, "rank 1 died without a result")],
)
def test_a_rank_that_fails_is_reported(fault, report):
    with pytest.raises(RankError, match=report):
        run_ranks(fault, 2)
