"""The progress of a run: a bar on a terminal, occasional lines in a log."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.log import progress_bar
from pipeline.training.observer import Observer, StepEvent


class ProgressDisplay(Observer):
    """Shows the step, its figures and the time left; a log gets the first step, the last, and one every `every_s`."""

    def __init__(self, step: int, steps: int, every_s: float) -> None:
        self._steps = steps
        self._first = True
        self._bar = progress_bar("training", steps, " steps", done=step, every_s=every_s, scaled=False)

    def on_step(self, event: StepEvent) -> None:
        if event.seconds is None:
            return  # nothing was computed
        self._bar.move_to(event.step, "  ".join(worded(event.figures)), show=self._first or event.step == self._steps)
        self._first = False

    def on_end(self, *, finished: bool) -> None:
        self._bar.close()


def worded(figures: Mapping[str, float]) -> list[str]:
    """The most important figures as text, as far as they are known."""
    device = "GPU" if "memory_peak_allocated_gib" in figures else "rank"
    words = {
        "loss": "loss {:.4f}",
        "learning_rate": "learning rate {:.2e}",
        "tokens_per_second_per_gpu": f"{{:,.0f}} tokens/s per {device}",
        "mfu": "MFU {:.1%}",
    }
    return [form.format(figures[name]) for name, form in words.items() if name in figures]
