"""The figures of every step: in metrics.jsonl, in TensorBoard's format, and as a line of progress.

A run that resumes from step k, or rolls back to it, drops what was written after k, so that each
step has one line. A run that begins again keeps what was written, as metrics.jsonl.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

from pipeline import log
from pipeline.config.stage_plan import TrainingStage
from pipeline.files.appending import AppendedFile
from pipeline.observers.event_file import first_events, new_event_file, step_events
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

    On a full disk they wait in memory.
    """

    def __init__(self, folder: Path, step: int, stages: Sequence[TrainingStage] = ()) -> None:
        """`stages` are those of a run that trains in stages."""
        self.folder = folder
        self._stages = {stage.first_step + 1: stage for stage in stages if stage.name}
        self._lines = AppendedFile(folder / METRICS)
        self._events: AppendedFile | None = None
        self._purge_step: int | None = None
        self._failing = False
        folder.mkdir(parents=True, exist_ok=True)
        self._go_back_to(step)

    def on_step(self, event: StepEvent) -> None:
        values = {"step": event.step, **event.figures}
        # orjson writes null for a number that is not finite.
        self._lines.add(event.step, orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE))
        self._add_to_board(event)
        try:
            self._write()
            self._failing = False
        except OSError as fault:
            if not self._failing:
                _logger.error(
                    "%s: cannot be written (%s); its lines wait in memory",
                    self.folder,
                    fault.strerror,
                )
            self._failing = True

    def on_rollback(self, step: int) -> None:
        self.on_end(finished=False)
        self._go_back_to(step)

    def on_end(self, *, finished: bool) -> None:
        try:
            self._write()
        except OSError as fault:
            _logger.error(
                "%s: its last lines are not written (%s)", self.folder / METRICS, fault.strerror
            )

    def _go_back_to(self, step: int) -> None:
        """Continues after the line of `step`."""
        if step == 0:
            keep_aside(self.folder / METRICS)
        cut_after(self.folder / METRICS, step)
        self._lines.drop_after(step)
        # A new file of events, whose beginning hides the later steps of those before.
        self._events = None
        self._purge_step = step + 1 if step else 0

    def _add_to_board(self, event: StepEvent) -> None:
        if self._events is None:
            self._events = AppendedFile(new_event_file(board_folder(self.folder)))
            self._events.add(event.step, first_events(self._purge_step))
        texts = dict(event.texts)
        stage = self._stages.get(event.step)
        if stage is not None:
            texts["stage"] = f"stage {stage.number + 1} of {len(self._stages)}: {stage}"
        self._events.add(event.step, step_events(event.step, event.figures, texts))

    def _write(self) -> None:
        self._lines.write()
        if self._events is not None:
            self._events.path.parent.mkdir(parents=True, exist_ok=True)
            self._events.write()


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
