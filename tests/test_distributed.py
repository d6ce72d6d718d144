"""`run_ranks`: results in rank order, and every failure of a rank reported."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks


def sum_of_ranks() -> tuple[int, torch.Tensor]:
    own = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(own)
    return dist.get_rank(), own


def raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("one rank's own fault")
    dist.barrier()


def dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_are_in_rank_order():
    assert run_ranks(sum_of_ranks, 3) == [(rank, torch.tensor([3.0])) for rank in range(3)]


@pytest.mark.parametrize(
    ("fault", "report"), [(raises, r"(?s)^rank 1 raised.*one rank's own fault"), (dies, "rank 1 died without a result")]
)
def test_a_rank_that_fails_is_reported(fault, report):
    with pytest.raises(RankError, match=report):
        run_ranks(fault, 2)
