"""Work that may fail on any rank: afterwards all ranks continue, or all stop and one reports the
error."""

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
    """Runs `work`, which must contain no collective, on every rank, and returns this rank's result.

    Every rank must call it.

    Raises:
        Exception: whatever `work` raised, on the lowest rank that failed. If other ranks succeeded,
            the message of a UserError names the rank and its node.
        SystemExit: on the other ranks, with the same exit code, so that the user reads one line and
            no rank waits.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as fault:  # noqa: BLE001  # raised again below, when the other ranks know of it
        error = fault
    exit_codes = all_gathered(exit_code_of(error) if error else None)
    failed = [rank for rank, code in enumerate(exit_codes) if code is not None]
    if not failed:
        return cast(Result, result)
    if error is None or dist.get_rank() != failed[0]:
        raise SystemExit(exit_codes[failed[0]])
    if isinstance(error, UserError) and len(failed) < len(exit_codes):
        raise type(error)(f"rank {failed[0]} on {node()}: {error}") from None
    raise error


def broadcast_from_rank0(work: Callable[[], Result]) -> Result:
    """Runs `work` on rank 0 alone and returns its result, which must be picklable, on every rank.

    Every rank must call it. `work` must contain no collective.

    Raises:
        Exception: whatever `work` raised, on rank 0.
        SystemExit: on the other ranks, with the same exit code.
    """
    answer: list[object] = [None, None]  # the result, and the exit code of a fault
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except Exception as fault:  # noqa: BLE001  # raised again below, when the other ranks know of it
            error, answer[1] = fault, exit_code_of(fault)
    dist.broadcast_object_list(answer, src=0)
    if error is not None:
        raise error
    if answer[1] is not None:
        raise SystemExit(answer[1])
    return cast(Result, answer[0])


def raise_on_all_ranks(error: UserError) -> NoReturn:
    """Stops the run for an error that every rank has found; every rank must call it.

    Raises:
        UserError: `error`, on rank 0.
        SystemExit: on the other ranks, with the exit code of `error`.
    """  # noqa: DOC501  # the AssertionError is for mypy

    def fail() -> NoReturn:
        raise error

    run_on_all_ranks(fail)
    raise AssertionError("unreachable: run_on_all_ranks raises what every rank raised")


def all_gathered(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Every rank's `value`, in the order of the ranks of `group` (None: all ranks).

    Every rank of `group` must call it.
    """
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def summed(values: Tensor) -> Tensor:
    """The sum of all ranks' `values`, on the host; every rank must call it. `values` become the sum
    too.

    An NCCL collective returns before it is done. The wait for the other ranks happens in the copy
    to the host, inside this function, which the watchdog recognises as waiting.
    """
    dist.all_reduce(values)
    return values.cpu()


def warn_on_rank0(logger: logging.Logger, message: str, *values: object) -> None:
    """Logs a warning on rank 0 only, of something that every rank has found."""
    if dist.get_rank() == 0:
        logger.warning(message, *values)
