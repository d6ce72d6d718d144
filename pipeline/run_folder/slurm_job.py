"""The state of a Slurm job: it runs, waits in the queue, was cancelled, or ended otherwise."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

_TIMEOUT_S = 10
"""How long one question to Slurm may take; slurmctld may be busy or failing over."""
_RUNNING = (
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
)
_QUEUED = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


class SlurmJob(NamedTuple):
    """A job's state: `name` is Slurm's own word for it, such as TIMEOUT."""

    kind: Literal["running", "queued", "cancelled", "ended"]
    name: str


@lru_cache(maxsize=256)
def slurm_job(job: str) -> SlurmJob | None:
    """The state of the job with the number `job`; None where Slurm does not know it.

    slurmctld forgets a job some minutes after its end; the accounting, where there is one, still
    knows it.
    """
    name = _state_of_controller(job) or _state_of_accounting(job)
    if name is None:
        return None
    if name in _RUNNING:
        return SlurmJob("running", name)
    if name in _QUEUED:
        return SlurmJob("queued", name)
    if name == "CANCELLED":
        return SlurmJob("cancelled", name)
    return SlurmJob("ended", name)


def _state_of_controller(job: str) -> str | None:
    # First the controller, which every cluster has; accounting (slurmdbd) is optional, and lags.
    answer = _answer_of(["scontrol", "show", "job", job, "--oneliner"])
    states = re.findall(r"\bJobState=(\w+)", answer)
    # An array's number gives a line for each task: it runs while one of them does.
    for state in states:
        if state in _RUNNING:
            return state
    if not states:
        return None
    return states[-1]


def _state_of_accounting(job: str) -> str | None:
    answer = _answer_of(
        ["sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2", "--format=State"]
    )
    words = answer.split()
    if not words:
        return None
    return words[0]  # of "CANCELLED by 1000"


def _answer_of(command: Sequence[str]) -> str:
    """What `command` prints; nothing where it is not installed, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout
