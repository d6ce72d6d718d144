"""Whether an attempt that ended is retried.

It is retried while the run makes progress, which is a newer checkpoint, and not forever without.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import worth_another_attempt
from pipeline.run_folder.attempts import (
    Attempt,
    Decision,
    StageEnd,
    read_attempts,
    record_end,
    series_and_number,
    this_attempt,
)
from pipeline.run_folder.checkpoint_names import newest_checkpoint_step


def decide_retry(
    folder: Path, *, stage: str, exit_code: int, without_progress: int, most: int
) -> Decision:
    """Decides whether the attempt that just ended in `stage` is retried, and records it.

    A series has at most `most` restarts, of which at most `without_progress` in a row bring no
    newer checkpoint. An attempt that saved and stopped counts like a failed one, so that a stage
    too long for a job's time limit ends.
    """
    _, restarts = series_and_number(this_attempt())
    idle = _idle_attempts(folder, stage, exit_code)
    if not worth_another_attempt(exit_code):
        # The same command would fail again; requeueing it would take other users' time.
        decision = Decision(False, "its cause must be fixed first")
    elif restarts >= most:
        why = f"it was restarted {restarts} times, and MAX_RESTARTS is {most}"
        decision = Decision(False, why)
    # Progress is a newer checkpoint, not time: a job that is preempted every hour but saves goes
    # on, and one that fails at the same step ends.
    elif idle > without_progress:
        limit = f"MAX_RESTARTS_WITHOUT_PROGRESS is {without_progress}"
        why = f"{idle} attempt(s) in a row brought no newer checkpoint, and {limit}"
        decision = Decision(False, why)
    else:
        why = f"restart {restarts + 1}, {idle} of at most {without_progress} without progress"
        decision = Decision(True, why)
    record_end(folder, exit_code=exit_code, stage=stage, retry=decision)
    return decision


def _idle_attempts(folder: Path, stage: str, exit_code: int) -> int:
    """How many attempts of this series, up to the one that just ended, came after the last save.

    Attempts that left no line count too, so that a disk that takes no records ends a run as well.
    """
    newest = newest_checkpoint_step(folder)
    series, own_number = series_and_number(this_attempt())
    attempts: dict[int, Attempt] = {}
    for attempt in read_attempts(folder):
        attempt_series, number = series_and_number(attempt.name)
        if attempt_series == series and number <= own_number:
            attempts[number] = attempt
    # Its own end is not on record yet, and perhaps not even its start.
    just_ended = attempts.setdefault(own_number, Attempt(this_attempt(), newest))
    just_ended.add(StageEnd(stage=stage, checkpoint_step=newest, exit_code=exit_code))

    # An attempt saved if it began at an older checkpoint than the newest one.
    saved_last = -1
    for number, attempt in attempts.items():
        if attempt.checkpoint_step < newest:
            saved_last = max(saved_last, number)
    idle = own_number - saved_last
    for number, attempt in attempts.items():
        if number > saved_last and attempt.needs_no_checkpoint:
            idle -= 1
    return idle
