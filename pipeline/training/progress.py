"""How far the run is: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from pipeline import log

_SECONDS_BETWEEN_LINES = 10.0
_logger = log.get_logger(__name__)


class Progress:
    """Shows the step, the loss and the time that is left; says nothing unless `visible`."""

    def __init__(self, step: int, steps: int, *, visible: bool) -> None:
        self._steps = steps
        self._first_step = step
        self._started = self._last_line = time.monotonic()
        self._visible = visible
        self._bar: Any = None  # tqdm's stubs know no bar without an iterable
        if visible and sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True)

    def advance(self, step: int, loss: float, learning_rate: float) -> None:
        """`step` steps are done."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{learning_rate:.2e}", refresh=False)
            self._bar.update()
        elif self._visible:
            self._line(step, loss, learning_rate)

    def _line(self, step: int, loss: float, learning_rate: float) -> None:
        now = time.monotonic()
        first, last = step == self._first_step + 1, step == self._steps
        if not (first or last) and now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        left = (now - self._started) / (step - self._first_step) * (self._steps - step)
        _logger.info(
            "step %d/%d  loss %.4f  learning rate %.2e  %s left",
            step,
            self._steps,
            loss,
            learning_rate,
            timedelta(seconds=round(left)),
        )

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()
