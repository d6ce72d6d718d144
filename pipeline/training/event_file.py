"""TensorBoard's files, record by record. Its own writer is a thread, which ends for good at the first full disk."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

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
