"""The figures of every step: in metrics.jsonl, in TensorBoard's format, and as a line of progress.

A run that resumes from step k, or rolls back to it, drops what was written after k, so that each
step has one line. A run that begins again keeps what was written, as metrics.jsonl.1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson
from torch.utils.tensorboard.writer import SummaryWriter

from pipeline import log
from pipeline.config.stage_plan import TrainingStage
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.training.observer import Observer, StepEvent

BOARD = "tensorboard"
_logger = log.get_logger(__name__)


def board_folder(folder: Path) -> Path:
    """The folder of TensorBoard's files of the run in `folder`.

    TensorBoard names a run by the path below the folder that it is shown.
    """
    board = folder / BOARD
    has_older_files = any(board.glob("events.*"))
    if has_older_files:
        # An attempt of an earlier version wrote them there: the run goes on in them.
        return board
    return board / folder.resolve().name


class MetricsFiles(Observer):
    """Writes the figures of every step.

    On a full disk the lines of metrics.jsonl wait in memory, and TensorBoard lacks the steps.
    """

    def __init__(self, folder: Path, step: int, stages: Sequence[TrainingStage] = ()) -> None:
        """`stages` are those of a run that trains in stages."""
        self.folder = folder
        self._stages = {stage.first_step + 1: stage for stage in stages if stage.name}
        self._waiting: list[tuple[int, bytes]] = []
        self._failing = False
        self._board: SummaryWriter | None = None
        self._purge_step: int | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._go_back_to(step)

    def on_step(self, event: StepEvent) -> None:
        values = {"step": event.step, **event.figures}
        # orjson writes null for a number that is not finite.
        line = orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
        self._waiting.append((event.step, line))
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
        self._waiting = [waiting for waiting in self._waiting if waiting[0] <= step]
        self._board = None
        self._purge_step = step + 1 if step else 0

    def _write_lines(self) -> None:
        """Appends what waits: all of it, or nothing."""
        with (self.folder / METRICS).open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            rest = memoryview(b"".join(line for _, line in self._waiting))
            try:
                while rest:
                    written = file.write(rest)
                    rest = rest[written:]
            except OSError:
                # A full disk may have taken half of a line.
                file.truncate(end)
                raise
        self._waiting.clear()

    def _write_board(self, event: StepEvent) -> None:
        # It is made anew after a rollback, and after a full disk, which ends the writer's thread.
        if self._board is None:
            self._board = SummaryWriter(str(board_folder(self.folder)), purge_step=self._purge_step)
        for name, value in event.figures.items():
            self._board.add_scalar(name, value, event.step)
        for name, text in event.texts.items():
            self._board.add_text(name, text, event.step)
        stage = self._stages.get(event.step)
        if stage is not None:
            text = f"stage {stage.number + 1} of {len(self._stages)}: {stage}"
            self._board.add_text("stage", text, event.step)
        self._board.flush()
        self._purge_step = None


def keep_aside(path: Path) -> None:
    """Renames a metrics.jsonl with figures of steps, and says so.

    A run that begins again replaces no figures of its earlier attempt.
    """
    if not any(line["step"] for line in read_metrics(path)):
        return
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.{number}")
        if not aside.exists():
            break
    path.rename(aside)
    _logger.warning(
        "%s: the run begins at step 0; the figures of its earlier attempt are in %s",
        path,
        aside.name,
    )


def cut_after(path: Path, step: int) -> None:
    """Truncates a metrics.jsonl after the line of `step`, or to nothing for step 0.

    It needs no room on the disk.
    """
    with suppress(FileNotFoundError), path.open("rb+") as file:
        end = 0
        if step > 0:
            end = _end_of(file, step)
        file.truncate(end)


def _end_of(file: Iterable[bytes], step: int) -> int:
    """The position after the last complete line of a step up to `step`."""
    end = 0
    position = 0
    for line in file:
        position += len(line)
        # A disk may have damaged a line, and a kill cut it short.
        with suppress(ValueError, TypeError, KeyError):
            if orjson.loads(line)["step"] <= step and line.endswith(b"\n"):
                end = position
    return end


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
    formats = {
        "loss": "loss {:.4f}",
        "learning_rate": "learning rate {:.2e}",
        "tokens_per_second_per_gpu": f"{{:,.0f}} tokens/s per {device}",
        "mfu": "MFU {:.1%}",
    }
    texts = []
    for name, text in formats.items():
        if name in figures:
            texts.append(text.format(figures[name]))
    return texts
