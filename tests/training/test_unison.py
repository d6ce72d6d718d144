"""A fault on one rank ends all of them, and is told once."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pipeline.errors import DataError
from pipeline.training.unison import in_unison
from tests.distributed import run_ranks


def _outcome(failing: tuple[int, ...]) -> str:
    def work() -> int:
        if dist.get_rank() in failing:
            raise DataError(f"corpus {dist.get_rank()}")
        return dist.get_rank()

    try:
        return str(in_unison(work))
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
