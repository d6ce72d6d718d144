"""What a check comes back with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.errors import PassingPreflightError, PreflightError


class Fault(NamedTuple):
    """One thing that is wrong; `node` is the one to leave out, where that would mend it.

    `passing`: it may be gone the next time, without anybody's help.
    """

    text: str
    node: str | None = None
    passing: bool = False


class Finding(NamedTuple):
    """What one check measured, as a line for the log, and what is wrong. Equal on all ranks."""

    measured: str
    faults: tuple[Fault, ...] = ()


def refuse_faults(findings: Sequence[Finding]) -> None:
    """Raises PreflightError with every fault of `findings`, and the option that takes the broken nodes out of a job.

    It is a PassingPreflightError where every fault may pass.
    """
    faults = [fault for finding in findings for fault in finding.faults]
    if not faults:
        return
    nodes = sorted({fault.node for fault in faults if fault.node is not None})
    leave_out = f"; to leave the broken out of the job: --exclude={','.join(nodes)}" if nodes else ""
    kind = PassingPreflightError if all(fault.passing for fault in faults) else PreflightError
    raise kind(f"preflight: {len(faults)} fault(s): {'; '.join(fault.text for fault in faults)}{leave_out}")
