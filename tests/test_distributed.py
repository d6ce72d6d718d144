"""`run_ranks`: results in rank order, and every failure of a rank reported."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tests.distributed import RankError, run_ranks


def fails(killed: bool) -> None:
    if dist.get_rank() == 1:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("one rank's own fault")
    dist.barrier()


def test_results_are_in_rank_order_and_a_rank_that_fails_is_reported():
    assert run_ranks(dist.get_rank, 3) == [0, 1, 2]
    for killed, report in (
        (False, r"(?s)^rank 1 raised.*one rank's own fault"),
        (True, "rank 1 died without a result"),
    ):
        with pytest.raises(RankError, match=report):
            run_ranks(fails, 2, killed)
