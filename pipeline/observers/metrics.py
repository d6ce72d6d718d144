"""The run's figures by step: TensorBoard, and metrics.jsonl for everything else.

A run that goes on from step k, or goes back to it, drops what was written after k: each step has one line. A full disk
loses none.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import socket
import time
from collections import deque
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from pipeline import log
from pipeline.run_folder.metrics import METRICS
from pipeline.training.observer import Observer, StepEvent

# --- A file that grows by whole pieces, and waits where the disk is full --------------------------------------------

_logger = log.get_logger(__name__)


class AppendedFile:
    """Takes pieces for the end of `path`. What cannot be written is held and tried again with the next piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._held: deque[bytes] = deque()
        self._failing = False

    def append(self, *pieces: bytes) -> None:
        """Writes what is held and then `pieces`, or holds them too."""
        self._held.extend(pieces)
        try:
            while self._held:
                self._write(self._held[0])
                self._held.popleft()
            self._failing = False
        except OSError as fault:
            if not self._failing:
                _logger.error("%s: cannot be written (%s); what goes into it is held", self.path, fault.strerror)
            self._failing = True

    def _write(self, piece: bytes) -> None:
        """All of `piece` or nothing."""
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
        """Tries for the last time."""
        self.append()
        if self._held:
            _logger.error("%s: the last %d pieces are lost", self.path, len(self._held))
        if self._file is not None:
            self._file.close()


# --- TensorBoard's files, record by record. Its own writer is a thread, which ends for good at the first full disk ---

_serial = itertools.count()


def event_file_name() -> str:
    """A name that TensorBoard looks for, after those of earlier attempts."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}"


def first_events(purge_step: int) -> list[bytes]:
    """What such a file begins with; of earlier files TensorBoard drops what they say of `purge_step` and later."""
    start = SessionLog(status=SessionLog.START)
    return [
        _record(Event(wall_time=time.time(), file_version="brain.Event:2")),
        _record(Event(wall_time=time.time(), step=purge_step, session_log=start)),
    ]


def scalar_event(name: str, value: float, step: int) -> bytes:
    """One figure after `step` steps."""
    return _record(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


# --- The run's figures by step: TensorBoard, and metrics.jsonl fo ---

BOARD = "tensorboard"


class MetricsFiles(Observer):
    """Writes every step's figures, each under its lasting name."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self._open(step)

    def on_step(self, event: StepEvent) -> None:
        self._lines.append((json.dumps({"step": event.step, **event.figures}) + "\n").encode())
        self._events.append(*(scalar_event(name, value, event.step) for name, value in event.figures.items()))

    def on_rollback(self, step: int) -> None:
        self._close()
        self._open(step)

    def on_end(self, *, finished: bool) -> None:
        self._close()

    def _close(self) -> None:
        self._lines.close()
        self._events.close()

    def _open(self, step: int) -> None:
        """Begins behind the line of `step`: what was written after it is void."""
        (self.folder / BOARD).mkdir(parents=True, exist_ok=True)
        cut_after(self.folder / METRICS, step)
        self._lines = AppendedFile(self.folder / METRICS)
        self._events = AppendedFile(self.folder / BOARD / event_file_name())
        self._events.append(*first_events(step + 1 if step else 0))


def cut_after(path: Path, step: int) -> None:
    """Ends a metrics.jsonl after the line of `step`; of a run that begins, nothing stays. Takes no room on the disk."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb+") as file:
        for line in file if step > 0 else ():
            if _step_of(line) > step:
                break
            kept += len(line)
        file.truncate(kept)


def _step_of(line: bytes) -> float:
    """The step that a line is about; one that a killed process left unfinished is about none yet."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except ValueError:
        return math.inf
