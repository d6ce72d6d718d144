"""Gives damaged inputs to readers, each in a child process, and says how each ended."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import INTERNAL_FAULT, UserError, exit_code_of, in_one_line
from tests.fuzz.damage import damage_any

INPUT = Path("input")
"""What is damaged. Everything is relative to a subject's own folder, so that copies of it hold the same bytes."""


GOOD = ("right", "refused")
CPU_SECONDS = 60
"""How long an input may compute. The readers need less than a second."""
WALL_SECONDS = 900
MEMORY_BYTES = 16 * 2**30
_LONGEST_MESSAGE = 2_000


@dataclass(frozen=True)
class Subject:
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


def digest(parts: Iterable[bytes]) -> str:
    """A hash of `parts`."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


@dataclass(frozen=True)
class Result:
    """How one input ended; with the seed its number makes it again. docs/faults.md explains `outcome`."""

    number: int
    target: str
    subject: str
    outcome: str
    damage: str
    why: str = ""


class Laboratory:
    """A folder with the sound inputs of all subjects, of which copies are damaged and read."""

    def __init__(self, folder: Path, subjects: Sequence[Subject], seed: int) -> None:
        self.folder = folder.absolute()
        self.seed = seed
        self.targets: dict[str, list[Subject]] = {}
        for subject in subjects:
            self.targets.setdefault(subject.target, []).append(subject)
        self._truth: dict[Subject, Mapping[str, str]] = {}

    def prepare(self, targets: Iterable[str]) -> None:
        """Makes the sound inputs, and reads each, undamaged: a reader that refuses its own is an AssertionError."""
        for subject in (subject for target in targets for subject in self.targets[target]):
            shutil.rmtree(self._sound(subject), ignore_errors=True)
            self._sound(subject).mkdir(parents=True)
            for place, work in ((self._sound(subject), subject.make), (None, subject.read)):
                at = place or self._copy(subject, "truth")
                answer = _result_of(_in_child(partial(_content_of, work), at), at)
                assert answer["kind"] == "content", f"{subject.target}/{subject.name} unharmed: {answer}"
            self._truth[subject] = answer["content"]

    def subject_of(self, number: int) -> Subject:
        """Whose input that is. It depends on seed and number alone."""
        targets = list(self.targets.values())
        return random.Random(f"{self.seed}/{number}/subject").choice(targets[number % len(targets)])

    def results(self, numbers: Iterator[int], lanes: int) -> Iterator[Result]:
        """The results of inputs as they end, `lanes` at a time."""
        running: dict[int, tuple[int, str, Path]] = {}
        while True:
            while len(running) < lanes and (number := next(numbers, None)) is not None:
                place = self._copy(subject := self.subject_of(number), f"input-{number}")
                os.chdir(place)
                damage = subject.damage(INPUT, random.Random(f"{self.seed}/{number}"))
                running[_in_child(partial(_content_of, subject.read), place, wait=False)] = (number, damage, place)
            if not running:
                return
            child, status = os.wait()
            number, damage, place = running.pop(child)
            outcome, why = self._judge(self.subject_of(number), _result_of(status, place))
            if outcome in GOOD:
                shutil.rmtree(place)
            subject = self.subject_of(number)
            yield Result(number, subject.target, subject.name, outcome, damage[:200], why[:2000])

    def _judge(self, subject: Subject, answer: Mapping[str, Any]) -> tuple[str, str]:
        kind, text = answer["kind"], answer.get("text", "")
        if kind == "content":
            truth = self._truth[subject]
            if subject.exact and any(truth.get(name) != value for name, value in answer["content"].items()):
                return "silent change", "accepted, with another content than was written"
            return "right", ""
        if kind == "refused" and (str(INPUT) not in text or len(text) > _LONGEST_MESSAGE):
            return "vague", text
        return kind, text

    def _sound(self, subject: Subject) -> Path:
        return (
            self.folder / "sound" / subject.target.replace(" ", "-") / subject.name.replace(" ", "-").replace("/", "-")
        )

    def _copy(self, subject: Subject, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(self._sound(subject), self.folder / name, symlinks=True)
        return self.folder / name


def _in_child(work: Callable[[], dict[str, Any]], place: Path, *, wait: bool = True) -> int:
    """Writes the result of `work`, done in `place`, to answer.json; the child's status, or its id without `wait`."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(place)
        logging.disable()
        log = os.open(place / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(WALL_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        answer = work()
        (place / "answer.json").write_text(json.dumps(answer))
        os._exit(0)
    return os.waitpid(child, 0)[1] if wait else child


def _content_of(work: Callable[[], Mapping[str, str] | None]) -> dict[str, Any]:
    try:
        return {"kind": "content", "content": work() or {}}
    except BaseException as error:  # noqa: BLE001  every other end is a fault
        if isinstance(error, (UserError, OSError)) and exit_code_of(error) != INTERNAL_FAULT:
            return {"kind": "refused", "text": in_one_line(error)}  # as every command line prints it
        return {"kind": "traceback", "text": traceback.format_exc()}


def _result_of(status: int, place: Path) -> dict[str, Any]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        kind = "hang" if number in (signal.SIGXCPU, signal.SIGALRM) else "abort"
        return {"kind": kind, "text": signal.Signals(number).name}
    return dict(json.loads((place / "answer.json").read_text()))


def as_text(results: Sequence[Result]) -> str:
    """A row for each target, and a paragraph for each input that is not right or refused."""
    lines = [f"{'target':<24}  {'inputs':>6}  outcomes"]
    for target in [*dict.fromkeys(result.target for result in results)]:
        counts = Counter(result.outcome for result in results if result.target == target)
        lines.append(
            f"{target:<24}  {counts.total():>6}  {', '.join(f'{count} {name}' for name, count in counts.items())}"
        )
    bad = [result for result in results if result.outcome not in GOOD]
    lines += ["", *(f"{name}: {value}" for result in bad for name, value in asdict(result).items())]
    return "\n".join(lines)
