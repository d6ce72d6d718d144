"""How far a study is: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any

from tqdm import tqdm

from pipeline import log
from pipeline.run_folder.status import RunStatus, read_status
from pipeline.study.processes import Running

_EVERY_S = 30.0
_logger = log.get_logger(__name__)


class Progress(AbstractContextManager["Progress"]):
    """Shows how many of `total` runs are done, how far those at work are, and the time that is left."""

    def __init__(self, total: int, jobs: int) -> None:
        self._total, self._jobs = total, jobs
        self._typical_s: float | None = None
        self._last = time.monotonic()
        self._bar: Any = tqdm(total=total, unit="run", dynamic_ncols=True) if sys.stderr.isatty() else None

    def ended(self, done: int, ended: Sequence[Running]) -> None:
        """Tasks ended; `done` runs are finished now."""
        for one in ended:
            took_s = time.monotonic() - one.started
            if "convert" not in one.task.stages:  # what makes a base takes as long as it takes
                self._typical_s = took_s
            if self._bar is None:
                _logger.info("%d of %d runs done: %s in %s", done, self._total, one.task.name, _rounded(took_s))
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def tell(self, done: int, running: Sequence[Running]) -> None:
        """Shows what is at work, if it is time to."""
        now = time.monotonic()
        if now - self._last < (1.0 if self._bar is not None else _EVERY_S):
            return
        self._last = now
        statuses = [read_status(one.task.run.config.folder) for one in running]
        where = [f"{one.task.name} {_steps(status)}" for one, status in zip(running, statuses, strict=True)]
        left_s = time_left(
            [status.seconds_left for status in statuses], self._total - done - len(running), self._typical_s, self._jobs
        )
        end = f"about {_rounded(left_s)} left" if left_s is not None else "time left not known yet"
        if self._bar is not None:
            self._bar.set_postfix_str(f"{', '.join(where)}; {end}")
        else:
            _logger.info("%d of %d runs done; %s; %s", done, self._total, ", ".join(where), end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def time_left(running_s: Sequence[float | None], waiting: int, typical_s: float | None, jobs: int) -> float | None:
    """Seconds until all is done, if `waiting` more runs of about `typical_s` follow those at work, `jobs` at a time."""
    guesses = [left if left is not None else typical_s for left in running_s]
    known = [guess for guess in guesses if guess is not None]
    if len(known) < len(guesses) or (waiting > 0 and typical_s is None):
        return None
    return max([(sum(known) + waiting * (typical_s or 0.0)) / jobs, *known])


def _steps(status: RunStatus) -> str:
    if not status.steps:
        return "starts"
    own = "" if status.seconds_left is None else f" ({_rounded(status.seconds_left)})"
    return f"{status.step}/{status.steps}{own}"


def _rounded(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
