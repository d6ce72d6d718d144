"""Whether an attempt that did not come to the end is made again: not without end, where none comes any further."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from pipeline.exit_codes import RESUME_LATER, worth_another_attempt
from pipeline.run_folder.attempts import (
    Attempt,
    Decision,
    newest_checkpoint_step,
    read_attempts,
    record_end,
    this_attempt,
)

_KEEPS_ITS_WORK = "tokenize"
"""The stage that goes on where it was stopped, and yet leaves no checkpoint that would tell."""


def decide(folder: Path, *, stage: str, exit_code: int, without_progress: int, most: int) -> Decision:
    """Decides about the attempt that just ended in `stage` of the run in `folder`, and puts it on record.

    There are at most `most` restarts in a series, and at most `without_progress` of them in a row in which no newer
    checkpoint appeared. To save and stop is progress where it left one; so a stage that never fits into a job's time is
    given up too. Only tokenizing, where it was told to stop, has come further whatever the checkpoints say.
    """
    own = Attempt(name=this_attempt())
    series = [one for one in read_attempts(folder) if one.series == own.series]
    own = next((one for one in series if one.name == own.name), own)
    restarts = int(own.name.rpartition(".")[2])
    attempts = [one for one in series if one is not own and one.at_risk and not _stopped_with_its_work(one)]
    if (stage, exit_code) != (_KEEPS_ITS_WORK, RESUME_LATER):
        attempts.append(own)
    idle = idle_attempts(attempts, newest_checkpoint_step(folder))
    if not worth_another_attempt(exit_code):
        decision = Decision(False, "its cause is to be mended first")
    elif restarts >= most:
        decision = Decision(False, f"it was restarted {restarts} times, and MAX_RESTARTS is {most}")
    elif idle > without_progress:
        limit = f"MAX_RESTARTS_WITHOUT_PROGRESS is {without_progress}"
        decision = Decision(False, f"{idle} attempt(s) in a row brought no newer checkpoint, and {limit}")
    else:
        decision = Decision(True, f"restart {restarts + 1}, {idle} of at most {without_progress} without progress")
    record_end(folder, exit_code=exit_code, stage=stage, retry=decision)
    return decision


def _stopped_with_its_work(attempt: Attempt) -> bool:
    ended = attempt.ended
    return ended is not None and (ended.stage, ended.exit_code) == (_KEEPS_ITS_WORK, RESUME_LATER)


def idle_attempts(attempts: list[Attempt], newest: int) -> int:
    """How many of the last attempts, in a row, brought no newer checkpoint; `newest` is the newest one's step now."""
    idle, reached = 0, 0
    for attempt, following in zip_longest(attempts, attempts[1:]):
        began = reached if attempt.started is None else attempt.started.checkpoint_step
        if following is None:
            reached = newest
        elif following.started is not None:
            reached = following.started.checkpoint_step
        else:
            reached = began if attempt.ended is None else attempt.ended.checkpoint_step
        idle = 0 if reached > began else idle + 1
    return idle
