"""The figures of every step: in metrics.jsonl, in TensorBoard's format, and as a line of progress.

A run that resumes from step k, or rolls back to it, drops what was written after k, so that each
step has one line. A run that begins again keeps what was written, as metrics.jsonl.1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import orjson
from torch.utils.tensorboard.writer import SummaryWriter

from pipeline import log
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.training.observer import Observer, StepEvent

BOARD = "tensorboard"
_logger = log.get_logger(__name__)


def board_folder(folder: Path) -> Path:
    """Where TensorBoard's files of the run in `folder` are: it names a run by the path below what
    it is shown.
    """
    board = folder / BOARD
    if any(board.glob("events.*")):  # of an attempt of an earlier version, which goes on there
        return board
    return board / folder.resolve().name


class MetricsFiles(Observer):
    """Writes the figures of every step. A full disk delays lines of metrics.jsonl, and TensorBoard
    lacks its steps.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self._waiting: list[tuple[int, bytes]] = []
        self._failing = False
        self._board: SummaryWriter | None = None
        self._purge_step: int | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._go_back_to(step)

    def on_step(self, event: StepEvent) -> None:
        values = {"step": event.step, **event.figures}  # what is not finite becomes null
        self._waiting.append((event.step, orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)))
        try:
            self._write_lines()
            self._write_board(event)
            self._failing = False
        except OSError as fault:
            if not self._failing:
                _logger.error(
                    "%s: cannot be written (%s); its lines wait in memory",
                    self.folder,
                    fault.strerror,
                )
            self._failing = True
            self._board = None

    def on_rollback(self, step: int) -> None:
        self.on_end(finished=False)
        self._go_back_to(step)

    def on_end(self, *, finished: bool) -> None:
        try:
            self._write_lines()
            if self._board is not None:
                self._board.close()
        except OSError as fault:
            _logger.error(
                "%s: its last lines are not written (%s)", self.folder / METRICS, fault.strerror
            )

    def _go_back_to(self, step: int) -> None:
        """Continues after the line of `step`."""
        if step == 0:
            keep_aside(self.folder / METRICS)
        cut_after(self.folder / METRICS, step)
        self._waiting = [(of_step, line) for of_step, line in self._waiting if of_step <= step]
        self._board = None
        self._purge_step = step + 1 if step else 0

    def _write_lines(self) -> None:
        """Appends what waits: all of it, or nothing."""
        with (self.folder / METRICS).open("ab", buffering=0) as file:
            whole, rest = (
                file.seek(0, os.SEEK_END),
                memoryview(b"".join(line for _, line in self._waiting)),
            )
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(whole)
                raise
        self._waiting.clear()

    def _write_board(self, event: StepEvent) -> None:
        if self._board is None:  # or its thread has met a full disk
            self._board = SummaryWriter(str(board_folder(self.folder)), purge_step=self._purge_step)
        for name, value in event.figures.items():
            self._board.add_scalar(name, value, event.step)
        self._board.flush()
        self._purge_step = None


def keep_aside(path: Path) -> None:
    """Renames a metrics.jsonl with figures of steps, and says so: a run that begins again replaces
    none of them.
    """
    if not any(line["step"] for line in read_metrics(path)):
        return
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    _logger.warning(
        "%s: the run begins at step 0; the figures of its earlier attempt are in %s",
        path,
        aside.name,
    )


def cut_after(path: Path, step: int) -> None:
    """Truncates a metrics.jsonl after the line of `step`, or to nothing for step 0; needs no room
    on the disk.
    """
    with suppress(FileNotFoundError), path.open("rb+") as file:
        end = at = 0
        for line in file if step else ():
            at += len(line)
            with suppress(
                ValueError, TypeError, KeyError
            ):  # a line that the disk damaged, or a kill cut short
                if orjson.loads(line)["step"] <= step and line.endswith(b"\n"):
                    end = at
        file.truncate(end)


class ProgressDisplay(Observer):
    """A bar on a terminal; a log gets the first step, the last, and one every `every_s`."""

    def __init__(self, step: int, steps: int, every_s: float) -> None:
        self._steps = steps
        self._first = True
        self._bar = log.progress_bar(
            "training", steps, " steps", done=step, every_s=every_s, scaled=False
        )

    def on_step(self, event: StepEvent) -> None:
        if event.seconds is not None:
            shown = self._first or event.step == self._steps
            self._bar.move_to(event.step, worded(event.figures), show=shown)
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
