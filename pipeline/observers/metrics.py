"""The figures of every step, in TensorBoard's format and in metrics.jsonl.

A run that resumes from step k, or rolls back to it, drops what was written after k, so that each step has one line. A
full disk loses nothing. TensorBoard's own writer is not used: its thread ends for good at the first full disk.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import time
from collections import deque
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

from pipeline import log
from pipeline.run_folder.metrics import METRICS, TEXTS
from pipeline.training.observer import Observer, StepEvent

BOARD = "tensorboard"
_serial = itertools.count()
_logger = log.get_logger(__name__)


class MetricsFiles(Observer):
    """Writes the figures of every step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self._open(step)

    def on_step(self, event: StepEvent) -> None:
        texts = {TEXTS: dict(event.texts)} if event.texts else {}
        self._lines.append((json.dumps({"step": event.step, **event.figures, **texts}) + "\n").encode())
        summaries = [scalar(name, value) for name, value in event.figures.items()]
        summaries += [text(f"prompt {at}", _quoted(*pair)) for at, pair in enumerate(event.texts.items(), start=1)]
        self._events.append(*(summary_event(summary, event.step) for summary in summaries))

    def on_rollback(self, step: int) -> None:
        self._close()
        self._open(step)

    def on_end(self, *, finished: bool) -> None:
        self._close()

    def _close(self) -> None:
        self._lines.close()
        self._events.close()

    def _open(self, step: int) -> None:
        """Continues after the line of `step`; what was written after it is dropped."""
        (self.folder / BOARD).mkdir(parents=True, exist_ok=True)
        cut_after(self.folder / METRICS, step)
        self._lines = AppendedFile(self.folder / METRICS)
        self._events = AppendedFile(self.folder / BOARD / event_file_name())
        self._events.append(*first_events(step + 1 if step else 0))


def cut_after(path: Path, step: int) -> None:
    """Truncates a metrics.jsonl after the line of `step`, or to nothing for step 0; needs no room on the disk."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb+") as file:
        read = 0
        for line in file if step > 0 else ():
            read += len(line)
            if (found := _step_of(line)) is None:
                continue  # a kill cut it short, or the disk damaged it: readers pass over it
            if found > step:
                break
            kept = read
        file.truncate(kept)


def _step_of(line: bytes) -> float | None:
    """The step of a line; None for one that cannot be read."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class AppendedFile:
    """Appends pieces to `path`, each whole or not at all; after a fault it retries with the next piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._held: deque[bytes] = deque()
        self._failing = False

    def append(self, *pieces: bytes) -> None:
        """Writes the held pieces and then `pieces`; holds what cannot be written."""
        self._held.extend(pieces)
        try:
            while self._held:
                self._write(self._held[0])
                self._held.popleft()
            self._failing = False
        except OSError as fault:
            if not self._failing:
                _logger.error("%s: cannot be written (%s); its content is held in memory", self.path, fault.strerror)
            self._failing = True

    def _write(self, piece: bytes) -> None:
        """Writes all of `piece` or nothing."""
        if self._file is None:
            self._file = io.FileIO(self.path, "a")
        whole, rest = self._file.seek(0, io.SEEK_END), memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(whole)
            raise

    def close(self) -> None:
        """Tries once more to write the held pieces."""
        self.append()
        if self._held:
            _logger.error("%s: the last %d pieces are lost", self.path, len(self._held))
        if self._file is not None:
            self._file.close()


def event_file_name() -> str:
    """A name that TensorBoard recognises, sorted after those of earlier attempts."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}"


def first_events(purge_step: int) -> list[bytes]:
    """The first records of an event file, which make TensorBoard drop `purge_step` and later from earlier files."""
    start = SessionLog(status=SessionLog.START)
    return [
        _record(Event(wall_time=time.time(), file_version="brain.Event:2")),
        _record(Event(wall_time=time.time(), step=purge_step, session_log=start)),
    ]


def summary_event(summary: Summary, step: int) -> bytes:
    """The record of a figure or a text after `step` steps."""
    return _record(Event(wall_time=time.time(), step=step, summary=summary))


def _quoted(prompt: str, written: str) -> str:
    """A prompt and what follows it, as a block of code in TensorBoard's Markdown."""
    return "\n".join(f"    {line}" for line in f"{prompt}→{written}".split("\n"))


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
