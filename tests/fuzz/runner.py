"""Gives damaged inputs to readers, each in a child process, and says how each ended."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import INTERNAL_FAULT, UserError, exit_code_of, in_one_line
from tests.fuzz.damage import damage_any

INPUT = Path("input")
"""What is damaged. Everything is relative to a subject's own folder, so that copies of it hold the same bytes."""
GOOD = ("right", "refused")
_WALL_SECONDS = 900
"""How long an input may take. The readers need less than a second."""
_LONGEST_MESSAGE = 2_000


class Subject(NamedTuple):
    """One reader of one kind of input.

    Attributes:
        target: the row of the table that it belongs to.
        name: its name among the target's.
        make: writes the sound input to `INPUT`, and other files that the reader needs beside it.
        read: reads it as the project does; returns digests of what it read, by name.
        exact: whether the project promises to notice any change. Then each digest must be that of the sound input.
        damage: damages the folder; returns what it did.
    """

    target: str
    name: str
    make: Callable[[], None]
    read: Callable[[], Mapping[str, str] | None]
    exact: bool = False
    damage: Callable[[Path, random.Random], str] = damage_any


class Result(NamedTuple):
    """How one input ended; the seed and its number make it again. docs/faults.md explains `outcome`."""

    number: int
    subject: str
    outcome: str
    damage: str
    why: str


def results(folder: Path, subjects: Sequence[Subject], seed: int, numbers: Iterable[int]) -> Iterator[Result]:
    """Makes the sound inputs in `folder`, and yields how damaged copies of them ended, of each target in turn.

    Each sound input is read first: a reader that refuses its own is an AssertionError.
    """
    targets: dict[str, list[Subject]] = {}
    truth: dict[Subject, Mapping[str, str]] = {}
    for subject in subjects:
        targets.setdefault(subject.target, []).append(subject)
        shutil.rmtree(_sound(folder, subject), ignore_errors=True)
        _sound(folder, subject).mkdir(parents=True)
        answer = _in_child(subject.make, _sound(folder, subject))
        if answer["kind"] == "content":
            answer = _in_child(subject.read, _copy(folder, subject, "truth"))
        assert answer["kind"] == "content", f"{subject.target}/{subject.name} unharmed: {answer}"
        truth[subject] = answer["content"]
    for number in numbers:
        draw = random.Random(f"{seed}/{number}")
        subject = draw.choice([*targets.values()][number % len(targets)])
        place = _copy(folder, subject, f"input-{number}")
        os.chdir(place)
        damage = subject.damage(INPUT, draw)
        outcome, why = _judge(subject, truth[subject], _in_child(subject.read, place))
        if outcome in GOOD:
            shutil.rmtree(place)
        yield Result(number, f"{subject.target}/{subject.name}", outcome, damage[:200], why[:2000])


def _judge(subject: Subject, truth: Mapping[str, str], answer: Mapping[str, Any]) -> tuple[str, str]:
    kind, text = answer["kind"], answer.get("text", "")
    if kind == "content":
        if subject.exact and any(truth.get(name) != value for name, value in answer["content"].items()):
            return "silent change", "accepted, with another content than was written"
        return "right", ""
    if kind == "refused" and (str(INPUT) not in text or len(text) > _LONGEST_MESSAGE):
        return "vague", text
    return kind, text


def _sound(folder: Path, subject: Subject) -> Path:
    return folder / "sound" / f"{subject.target}-{subject.name}".replace(" ", "-")


def _copy(folder: Path, subject: Subject, name: str) -> Path:
    shutil.rmtree(folder / name, ignore_errors=True)
    return Path(shutil.copytree(_sound(folder, subject), folder / name, symlinks=True))


def _in_child(work: Callable[[], Mapping[str, str] | None], place: Path) -> dict[str, Any]:
    """How `work` ends in `place`: {"kind": "content", "content": …}, or another kind and a text."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(place)
        logging.disable()
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(_WALL_SECONDS)
        try:
            answer = {"kind": "content", "content": work() or {}}
        except BaseException as error:  # noqa: BLE001  every other end is a fault
            answer = {"kind": "traceback", "text": traceback.format_exc()}
            if isinstance(error, (UserError, OSError)) and exit_code_of(error) != INTERNAL_FAULT:
                answer = {"kind": "refused", "text": in_one_line(error)}  # as every command line prints it
        (place / "answer.json").write_text(json.dumps(answer))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        kind = "hang" if number == signal.SIGALRM else "abort"
        return {"kind": kind, "text": signal.Signals(number).name}
    return dict(json.loads((place / "answer.json").read_text()))
