"""TensorBoard's files of events, as bytes.

`torch.utils.tensorboard.SummaryWriter` writes from a thread of its own. That thread ends with a
traceback on a full disk, and its writer cannot be closed any more. Here the caller writes.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

_VERSION = "brain.Event:2"
"""The first event of a file names the version of the format."""
_serial = itertools.count()


def new_event_file(folder: Path) -> Path:
    """A name for a new file in `folder`. TensorBoard reads the files of a folder in their order."""
    created = int(time.time())
    # As wide as needed to sort as text, where two files begin in the same second.
    serial = f"{next(_serial):06d}"
    return (
        folder / f"events.out.tfevents.{created:010d}.{socket.gethostname()}.{os.getpid()}.{serial}"
    )


def first_events(purge_step: int | None) -> bytes:
    """What a file begins with.

    Args:
        purge_step: TensorBoard hides the events of earlier files from this step on.
    """
    now = time.time()
    events = [Event(wall_time=now, file_version=_VERSION)]
    if purge_step is not None:
        started = SessionLog(status=SessionLog.START)
        events.append(Event(wall_time=now, step=purge_step, file_version=_VERSION))
        events.append(Event(wall_time=now, step=purge_step, session_log=started))
    return _records(events)


def step_events(step: int, figures: Mapping[str, float], texts: Mapping[str, str]) -> bytes:
    """The events of one step."""
    now = time.time()
    events = []
    for name, value in figures.items():
        events.append(Event(wall_time=now, step=step, summary=scalar(name, value)))
    for name, written in texts.items():
        events.append(Event(wall_time=now, step=step, summary=text(name, written)))
    return _records(events)


def _records(events: Iterable[Event]) -> bytes:
    """The events in the format of the file, each with its length and checksums."""
    file = io.BytesIO()
    writer = RecordWriter(file)
    for event in events:
        writer.write(event.SerializeToString())
    return file.getvalue()
