"""What a check of the preflight finds: a line for the log, and the faults of the allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Fault(NamedTuple):
    """A fault of an allocation."""

    text: str
    node: str | None = None
    """The node that is broken, to be excluded from the job; None: not a single node."""
    transient: bool = False
    """Whether another attempt may succeed."""


class Finding(NamedTuple):
    """What a check measured, as a line for the log, and its faults."""

    measured: str
    faults: Sequence[Fault] = ()
