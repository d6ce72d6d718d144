"""What every rank does for itself, and any may fail at: all go on, or all stop and one says why."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from pipeline.errors import UserError

Result = TypeVar("Result")


def in_unison(work: Callable[[], Result]) -> Result:
    """Runs `work`, which must contain no collective, on every rank.

    Raises:
        UserError: on the first rank whose `work` raised it.
        SystemExit: on the others, without a word, so that the user reads one line and no rank waits for another.
    """
    result: list[Result] = []
    error: UserError | None = None
    try:
        result.append(work())
    except UserError as fault:
        error = fault
    exit_codes: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(exit_codes, error.exit_code if error else None)
    failed = [rank for rank, code in enumerate(exit_codes) if code is not None]
    if not failed:
        return result[0]
    if error is None or dist.get_rank() != failed[0]:
        raise SystemExit(exit_codes[failed[0]])
    if len(failed) < len(exit_codes):
        raise type(error)(f"rank {failed[0]} on {socket.gethostname()}: {error}") from None
    raise error
