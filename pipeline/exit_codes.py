"""The exit codes of every command line here, for the scripts that decide what happens next.

`slurm/common.sh` acts on them, and docs/clusters.md lists them. A process that a signal ended has 128 + its number.
"""

from __future__ import annotations

FINISHED = 0
"""All is done."""
USER_ERROR = 1
"""A fault that the user must mend; the same command again would meet it again."""
CONFIG_ERROR = 2
"""The same, in the configuration or on the command line."""
LOST_RANK = 69
"""A rank died or hangs (`sysexits.h`: unavailable)."""
INTERNAL_FAULT = 70
"""An error that nobody foresaw; its traceback stands in the log (`sysexits.h`: software)."""
SLURM_FAULT = 71
"""srun could not start the ranks, or lost them (`sysexits.h`: system error; scripts set SLURM_EXIT_ERROR to it)."""
FOLDER_TAKEN = 73
"""Another job works in the run folder (`sysexits.h`: cannot create)."""
PASSING_FAULT = 74
"""A disk that is full or fails, or an allocation that does not measure up: may be gone the next time (`sysexits.h`: an
input or output error)."""
RESUME_LATER = 75
"""Saved, and to go on later (`sysexits.h`: a temporary failure)."""
INTERRUPTED = 130
"""Ctrl-C."""

_FINAL = (FINISHED, USER_ERROR, CONFIG_ERROR, FOLDER_TAKEN, INTERRUPTED)


def worth_another_attempt(exit_code: int) -> bool:
    """Whether the same command may come further the next time."""
    return exit_code not in _FINAL
