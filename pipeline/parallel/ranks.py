"""What every rank does for itself, and any may fail at: all go on, or all stop and one says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from pipeline.errors import UserError, exit_code_of
from pipeline.log import node

Result = TypeVar("Result")


def run_on_all_ranks(work: Callable[[], Result]) -> Result:
    """Runs `work`, which must contain no collective, on every rank.

    Raises:
        Exception: whatever `work` raised, on the first rank where it did.
        SystemExit: on the others, without a word, so that the user reads one line and no rank waits for another.
    """
    result: list[Result] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as fault:  # noqa: BLE001  # raised again below, when the others know of it
        error = fault
    exit_codes: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(exit_codes, exit_code_of(error) if error else None)
    failed = [rank for rank, code in enumerate(exit_codes) if code is not None]
    if not failed:
        return result[0]
    if error is None or dist.get_rank() != failed[0]:
        raise SystemExit(exit_codes[failed[0]])
    if isinstance(error, UserError) and len(failed) < len(exit_codes):
        raise type(error)(f"rank {failed[0]} on {node()}: {error}") from None
    raise error


def broadcast_from_rank0(work: Callable[[], Result]) -> Result:
    """Runs `work` on the first rank, and gives its result to all: file systems may show ranks different things.

    Raises:
        Exception, SystemExit: as `run_on_all_ranks`.
    """
    own = run_on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)
    results = [own]
    dist.broadcast_object_list(results, src=0)
    return cast(Result, results[0])


def raise_on_all_ranks(error: UserError) -> NoReturn:
    """Ends the run for a reason that every rank has found.

    Raises:
        UserError: `error`, on rank 0.
        SystemExit: on the others.
    """

    def fail() -> NoReturn:
        raise error

    run_on_all_ranks(fail)
    raise AssertionError("unreachable: run_on_all_ranks raises what every rank raised")


def summed(values: Tensor) -> Tensor:
    """The sum of all ranks' `values`, on the host; every rank must call it, and `values` are the sum too.

    NCCL's messages return before they are done, so a rank waits for the others in the copy: here, where the watchdog
    knows it for waiting.
    """
    dist.all_reduce(values)
    return values.cpu()


def warn_on_rank0(logger: logging.Logger, message: str, *values: object) -> None:
    """Warns of what every rank has seen, in one line instead of one a rank."""
    if dist.get_rank() == 0:
        logger.warning(message, *values)
