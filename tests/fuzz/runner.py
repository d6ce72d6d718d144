"""Gives damaged inputs to readers, each in a child process, and says how each ended."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import INTERNAL_FAULT, UserError, exit_code_of, in_one_line
from tests.fuzz.damage import damage

INPUT = Path("input")
"""What is damaged. Everything is relative to a subject's own folder, so that copies of it hold the same bytes."""
GOOD = ("right", "refused")
_WALL_SECONDS = 900
"""How long an input may take. The readers need less than a second."""
_LONGEST_MESSAGE = 2_000


class Subject(NamedTuple):
    """One reader of one kind of input, a row of the table."""

    target: str
    name: str
    make: Callable[[], object]
    """Writes the sound input to `INPUT`, and other files that the reader needs beside it."""
    read: Callable[[], object]
    """Reads it as the project does; returns what it read, if `exact`."""
    exact: bool = False
    """Whether the project promises to notice any change."""
    guarded: bool = False
    """Whether checksums guard the values of its JSON, too; else the JSON of an exact subject is only cut."""


class Result(NamedTuple):
    """How one input ended; the seed and its number make it again. docs/faults.md explains `outcome`."""

    number: int
    target: str
    subject: str
    outcome: str
    damage: str
    why: str


def results(folder: Path, subjects: Sequence[Subject], seed: int, numbers: Iterable[int]) -> Iterator[Result]:
    """Makes the sound inputs in `folder`, and yields how damaged copies of them ended, of each target in turn.

    Each sound input is read first: a reader that refuses its own is an AssertionError.
    """
    targets: dict[str, list[Subject]] = {}
    truth: dict[Subject, Any] = {}
    for subject in subjects:
        targets.setdefault(subject.target, []).append(subject)
        sound = _sound(folder, subject)
        shutil.rmtree(sound, ignore_errors=True)
        sound.mkdir(parents=True)
        outcome, answer = _in_child(subject.make, sound)
        if outcome == "right":
            outcome, answer = _in_child(subject.read, _copied(sound, folder / "truth"))
        assert outcome == "right", f"{subject.target}/{subject.name} unharmed: {answer}"
        truth[subject] = answer
    for number in numbers:
        draw = random.Random(f"{seed}/{number}")
        subject = draw.choice([*targets.values()][number % len(targets)])
        place = _copied(_sound(folder, subject), folder / f"input-{number}")
        os.chdir(place)
        done = damage(INPUT, draw, values=subject.guarded or not subject.exact)
        outcome, answer = _in_child(subject.read, place)
        if outcome == "right" and subject.exact and answer != truth[subject]:
            outcome, answer = "silent change", "accepted, with another content than was written"
        elif outcome == "refused" and (str(INPUT) not in answer or len(answer) > _LONGEST_MESSAGE):
            outcome = "vague"
        if outcome in GOOD:
            shutil.rmtree(place)
        yield Result(number, subject.target, subject.name, outcome, done[:200], str(answer)[:2000])


def _sound(folder: Path, subject: Subject) -> Path:
    return folder / "sound" / f"{subject.target}-{subject.name}".replace(" ", "-")


def _copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target, symlinks=True))


def _in_child(work: Callable[[], object], place: Path) -> tuple[str, Any]:
    """How `work` ends in `place`: "right" and what it returns, or another outcome and a text."""
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
            answer = ("right", work())
        except BaseException as error:  # noqa: BLE001  every other end is a fault
            answer = ("traceback", traceback.format_exc())
            if isinstance(error, (UserError, OSError)) and exit_code_of(error) != INTERNAL_FAULT:
                answer = ("refused", in_one_line(error))  # as every command line prints it
        (place / "answer.json").write_text(json.dumps(answer))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "hang" if number == signal.SIGALRM else "abort", signal.Signals(number).name
    outcome, answer = json.loads((place / "answer.json").read_text())
    return outcome, answer
