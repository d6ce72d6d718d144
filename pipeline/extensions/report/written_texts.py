"""What the model wrote during training, from TensorBoard's files of events in the run's folder."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from pipeline.run_folder.metrics import BOARD

_TAG = "prompt/"
_FIRST_EVENTS = 3
"""A file of events says in one of these which steps of earlier files it replaces."""
_LENGTH = struct.Struct("<Q")
_CHECKSUM_BYTES = 4


class Continued(NamedTuple):
    """A prompt, and how the model continued it, by step."""

    prompt: str
    texts: dict[int, str]


def read_written_texts(folder: Path) -> list[Continued]:
    """The texts of each prompt of `validation.prompts`, in their order; none without prompts.

    A file that a kill or a disk has cut short is read up to there.
    """
    written: dict[str, dict[int, str]] = {}
    # Below a folder with the name that the run's folder had: it may have been renamed since. The
    # names of the files begin with the time.
    for path in sorted((folder / BOARD).rglob("events.*"), key=lambda file: file.name):
        for event in _events(path):
            if event.session_log.status == SessionLog.START:
                _drop_from(written, event.step)
            for value in event.summary.value:
                if value.tag.startswith(_TAG) and value.tensor.string_val:
                    text = value.tensor.string_val[0].decode("utf-8", errors="replace")
                    written.setdefault(value.tag.split("/")[1], {})[event.step] = text
    numbers = sorted(filter(str.isdecimal, written), key=int)
    return [_continued(written[number]) for number in numbers]


def _drop_from(written: dict[str, dict[int, str]], step: int) -> None:
    """Drops the texts of the steps that a resumed run computes again."""
    for texts in written.values():
        for later in [known for known in texts if known >= step]:
            del texts[later]


def _events(path: Path) -> Iterator[Event]:
    """The events with texts, and the first ones, of a file.

    Those with figures alone, which may be millions, are passed over unread.
    """
    for number, record in enumerate(_records(path)):
        if number < _FIRST_EVENTS or _TAG.encode() in record:
            try:
                yield Event.FromString(record)
            except DecodeError:
                return


def _records(path: Path) -> Iterator[bytes]:
    """The records of a file of events: length, checksum of the length, bytes, their checksum."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while True:
            head = file.read(_LENGTH.size + _CHECKSUM_BYTES)
            if len(head) < _LENGTH.size + _CHECKSUM_BYTES:
                return
            (length,) = _LENGTH.unpack_from(head)
            if length > size:
                return
            record = file.read(length)
            if len(record) < length:
                return
            file.seek(_CHECKSUM_BYTES, 1)
            yield record


def _continued(texts: dict[int, str]) -> Continued:
    """A prompt and its continuations, which are recorded in Markdown: `**prompt** text`."""
    parted: dict[int, str] = {}
    prompt = ""
    for step, text in sorted(texts.items()):
        prompt, _, parted[step] = text.removeprefix("**").partition("** ")
    return Continued(prompt, parted)
