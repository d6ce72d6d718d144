"""Gives damaged inputs to readers, each in a child process, and says how each ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import INTERNAL_FAULT, UserError, exit_code_of, in_one_line
from tests.fuzz.damage import damage

INPUT = Path("input")
"""What is damaged. Everything is relative to a subject's own folder, so that copies of it hold the
same bytes."""
ANSWER = "answer.json"
GOOD = ("right", "refused")
ALARM_S = 60
"""How long an input may take. The readers need less than a second."""
MEMORY_BYTES = 4 * 2**30
"""How much an input may add to the address space. The readers add less than 1 GiB, most of it
mapped files."""
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
    """Whether checksums guard the values of its JSON, too; else the JSON of an exact subject is
    only cut."""


class Result(NamedTuple):
    """How one input ended; the seed and its number make it again. docs/faults.md explains
    `outcome`."""

    number: int
    target: str
    subject: str
    outcome: str
    damage: str
    why: str


def results(
    folder: Path,
    subjects: Sequence[Subject],
    seed: int,
    numbers: Iterable[int],
    alarm_s: int = ALARM_S,
) -> Iterator[Result]:
    """Makes the sound inputs in `folder`, and yields how damaged copies of them ended, of each
    target
    in turn.

    A reader that takes longer than `alarm_s` hangs.
    Each sound input is read first: a reader that refuses its own is an AssertionError.
    """
    targets: dict[str, list[Subject]] = {}
    truth: dict[Subject, Any] = {}
    for subject in subjects:
        targets.setdefault(subject.target, []).append(subject)
        sound = _sound(folder, subject)
        shutil.rmtree(sound, ignore_errors=True)
        sound.mkdir(parents=True)
        outcome, answer = _in_child(subject.make, sound, alarm_s)
        if outcome == "right":
            outcome, answer = _in_child(subject.read, _copied(sound, folder / "truth"), alarm_s)
        assert outcome == "right", f"{subject.target}/{subject.name} unharmed: {answer}"
        truth[subject] = answer
    for number in numbers:
        draw = random.Random(f"{seed}/{number}")
        subject = draw.choice([*targets.values()][number % len(targets)])
        place = _copied(_sound(folder, subject), folder / f"input-{number}")
        os.chdir(place)
        done = damage(INPUT, draw, values=subject.guarded or not subject.exact)
        outcome, answer = _in_child(subject.read, place, alarm_s)
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


def _in_child(work: Callable[[], object], place: Path, alarm_s: int) -> tuple[str, Any]:
    """How `work` ends in `place`: "right" and what it returns, or another outcome and a text."""
    (place / ANSWER).unlink(missing_ok=True)  # of the child that made the input
    child = os.fork()
    if child == 0:
        try:
            _answer(work, place, alarm_s)
        finally:
            os._exit(
                0
            )  # also after a fault of the fuzz itself: this process must never go on as its parent does
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its workers
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "hang" if number == signal.SIGALRM else "abort", signal.Signals(number).name
    if not (place / ANSWER).exists():
        return "abort", "it ended without an answer"
    outcome, answer = json.loads((place / ANSWER).read_text())
    return outcome, answer


def _answer(work: Callable[[], object], place: Path, alarm_s: int) -> None:
    """In the child: does `work` within the limits, and writes how it ended."""
    os.setpgid(0, 0)
    os.chdir(place)
    logging.disable()
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.alarm(alarm_s)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer = ("right", work())
    except MemoryError:
        answer = ("memory", f"it wanted more than {MEMORY_BYTES / 2**30:g} GiB")
    except BaseException as error:  # noqa: BLE001  every other end is a fault
        answer = ("traceback", traceback.format_exc())
        if isinstance(error, (UserError, OSError)) and exit_code_of(error) != INTERNAL_FAULT:
            answer = ("refused", in_one_line(error))  # as every command line prints it
    (place / ANSWER).write_text(json.dumps(answer))
