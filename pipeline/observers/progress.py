"""How far the run is: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from pipeline import log
from pipeline.training.observer import Observer, StepEvent

_logger = log.get_logger(__name__)


class Progress(Observer):
    """Shows the step, its figures and the time that is left, in a log at most every `every_s`."""

    def __init__(self, step: int, steps: int, every_s: float) -> None:
        self._steps = steps
        self._every_s = every_s
        self._taken = 0
        self._started = self._last_line = time.monotonic()
        self._bar: Any = None  # tqdm's stubs know no bar without an iterable
        if sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True)

    def on_step(self, event: StepEvent) -> None:
        if event.seconds is None:
            return  # nothing was computed
        self._taken += 1
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(worded(event.figures)), refresh=False)
            self._bar.update(event.step - self._bar.n)  # after a rollback there are fewer than there were
        else:
            self._line(event.step, event.figures)

    def _line(self, step: int, figures: Mapping[str, float]) -> None:
        now = time.monotonic()
        first, last = self._taken == 1, step == self._steps
        if not (first or last) and now - self._last_line < self._every_s:
            return
        self._last_line = now
        left_s = (now - self._started) / self._taken * (self._steps - step)
        words = "  ".join(worded(figures))
        _logger.info("step %d/%d  %s  %s left", step, self._steps, words, timedelta(seconds=round(left_s)))

    def on_end(self, *, finished: bool) -> None:
        if self._bar is not None:
            self._bar.close()


def worded(figures: Mapping[str, float]) -> list[str]:
    """The figures that a person watches, in words, as far as they are known."""
    words = {
        "loss": "loss {:.4f}",
        "learning_rate": "learning rate {:.2e}",
        "tokens_per_second_per_gpu": "{:,.0f} tokens/s per GPU",
        "mfu": "MFU {:.1%}",
    }
    return [form.format(figures[name]) for name, form in words.items() if name in figures]
