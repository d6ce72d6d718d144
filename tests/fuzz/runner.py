"""Gives damaged inputs to readers, each in a child process that is watched, and says how each ended."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import INTERNAL_FAULT, UserError, exit_code_of, in_one_line
from tests.fuzz.subject import INPUT, POOL, SilentChangeError, Subject
from tests.fuzz.table import GOOD, Result

SECONDS = 20.0
"""How long an input may compute, or wait. The readers need less than a second."""
_BUSY = 15
"""So many times as long may pass while the machine does other work."""
_IDLE = 0.02
"""What computes for a smaller share of the time waits for something that does not come."""
MEMORY_BYTES = 2 * 2**30
_FILE_BYTES = 4 * 2**30
"""The largest file that a reader may write."""
_LONGEST_MESSAGE = 2_000
_POLL_S = 0.02
_BLAME = re.compile(r'File "[^"]*?((?:pipeline|tools)/[\w/]+\.py)", line (\d+)')


class Laboratory:
    """A folder with the sound inputs of all subjects, in which lanes damage copies and read them."""

    def __init__(
        self,
        folder: Path,
        subjects: Sequence[Subject],
        seed: int,
        *,
        seconds: float = SECONDS,
        memory: int = MEMORY_BYTES,
    ) -> None:
        self.folder = folder.absolute()
        self.seed = seed
        self._seconds = seconds
        self._memory = memory
        self._targets: dict[str, list[Subject]] = {}
        for subject in subjects:
            self._targets.setdefault(subject.target, []).append(subject)
        self._truth: dict[Subject, dict[str, str]] = {}

    def prepare(self, targets: Sequence[str]) -> None:
        """Makes the sound inputs, and reads each, undamaged.

        Raises:
            AssertionError: a subject's reader does not accept its sound input.
        """
        chosen = [subject for target in targets for subject in self._targets[target]]
        made = self._in_child(partial(self._make, chosen))
        assert made["kind"] == "content", f"{made['kind']}: {made['text']}"
        for subject in chosen:
            place = self._fresh("truth", subject)
            answer = self._in_child(partial(_read, place, subject.truth or subject.read))
            assert answer["kind"] == "content", (
                f"{subject.target}/{subject.name} unharmed: {answer.get('error', answer['text'])}"
            )
            self._truth[subject] = answer["content"]

    def subject_of(self, number: int) -> Subject:
        """Whose input that is. It depends on seed and number alone."""
        targets = list(self._targets.values())
        return random.Random(f"{self.seed}/{number}/subject").choice(targets[number % len(targets)])

    def try_input(self, number: int, lane: str) -> tuple[Result, Path]:
        """Makes the input of that number, and reads it; returns the folder with what was read, and its log."""
        subject = self.subject_of(number)
        place = self._fresh(lane, subject)
        os.chdir(place)
        damage = subject.damage(INPUT, self._sound(subject) / POOL, random.Random(f"{self.seed}/{number}"))
        answer = self._in_child(partial(_read, place, subject.read), place / "log.txt", self._seconds, self._memory)
        outcome, why = self._judge(subject, answer)
        blamed = _BLAME.findall(answer["text"])
        # A dump of a stack begins with the innermost frame, a traceback ends with it.
        frame = () if not blamed else blamed[0] if outcome in ("hang", "abort", "memory") else blamed[-1]
        result = Result(
            number=number,
            target=subject.target,
            subject=subject.name,
            outcome=outcome,
            damage=damage[:200],
            why=why[:360],
            blame=":".join(frame) if outcome not in GOOD else "",
            seconds=answer["seconds"],
            peak_mib=answer["mib"],
        )
        return result, place

    def _judge(self, subject: Subject, answer: dict[str, Any]) -> tuple[str, str]:
        kind, text = answer["kind"], str(answer.get("error", answer["text"].strip().rpartition("\n")[2]))
        if kind == "content":
            truth, found = self._truth[subject], answer["content"]
            if subject.exact and any(truth.get(name) != value for name, value in found.items()):
                return "silent change", "accepted, with another content than was written"
            return "right", ""
        if kind == "refused" and (str(INPUT) not in text or "\n" in text or len(text) > _LONGEST_MESSAGE):
            return "vague", text
        return kind, text

    def _make(self, subjects: Sequence[Subject]) -> dict[str, str]:
        made: dict[Callable[[], None], Path] = {}
        for subject in subjects:
            place = self._sound(subject)
            shutil.rmtree(place, ignore_errors=True)
            if subject.make in made:
                shutil.copytree(made[subject.make], place)
                continue
            place.mkdir(parents=True)
            os.chdir(place)
            subject.make()
            made[subject.make] = place
        return {}

    def _sound(self, subject: Subject) -> Path:
        return self.folder / "sound" / subject.target.replace(" ", "-") / subject.name.replace(" ", "-")

    def _fresh(self, lane: str, subject: Subject) -> Path:
        place = self.folder / lane / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self._sound(subject), place, symlinks=True, ignore=shutil.ignore_patterns(str(POOL)))
        return place

    def _in_child(
        self,
        work: Callable[[], dict[str, str]],
        log: Path | None = None,
        seconds: float = 600,
        memory: int = 4 * MEMORY_BYTES,
    ) -> dict[str, Any]:
        """Does `work` in a child of this process; how that ended, with what it took."""
        log = log or self.folder / "prepare.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        receiver, sender = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(receiver)
            _be_the_child(work, sender, log)
        os.close(sender)
        ended_by, text, peak = "", b"", 0
        limit, computed = seconds, 0.0
        with os.fdopen(receiver, "rb", buffering=0) as pipe:
            while True:
                ready, _, _ = select.select([pipe], [], [], _POLL_S)
                if ready:
                    if not (piece := pipe.read(2**16)):
                        break
                    text += piece
                elif _has_ended(child):  # and a process that it started keeps the pipe open
                    break
                peak = max(peak, _anonymous_bytes(child))
                passed = time.monotonic() - began
                if passed > limit:
                    # Others may be what slows it: then it computes, and has not computed for `seconds` yet.
                    before, computed = computed, _computed(child)
                    if computed > seconds or computed - before < _IDLE * seconds or passed > _BUSY * seconds:
                        ended_by = "hang"
                    limit += seconds
                elif peak > memory:
                    ended_by = "memory"
                if ended_by:
                    _kill_group(child, first=signal.SIGUSR1)
                    break
        _, status, usage = os.wait4(child, 0)
        _kill_group(child)
        answer: dict[str, Any] = {"kind": ended_by or "abort", "text": log.read_text(errors="replace")}
        if ended_by == "hang":
            answer["error"] = f"did not end in {seconds:.0f} s"
        elif ended_by == "memory":
            answer["error"] = f"took {peak / 2**30:.1f} GiB"
        elif os.WIFSIGNALED(status):
            answer["error"] = f"died of {signal.Signals(os.WTERMSIG(status)).name}"
        elif text:
            answer |= json.loads(text)
        else:
            answer["error"] = f"ended with exit code {os.WEXITSTATUS(status)}"
        return answer | {"seconds": round(time.monotonic() - began, 2), "mib": usage.ru_maxrss // 1024}


def _read(place: Path, read: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    os.chdir(place)
    return dict(read())


def _be_the_child(work: Callable[[], dict[str, str]], sender: int, log: Path) -> None:
    """Does `work`, reports how it ended through the pipe `sender`, and ends this process."""
    try:
        os.setpgid(0, 0)
        file = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
        for stream in (0, 1, 2):
            os.dup2(os.open("/dev/null", os.O_RDONLY) if stream == 0 else file, stream)
        sys.stdout = sys.stderr = os.fdopen(file, "w", closefd=False)
        logging.lastResort = None
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, sys.stderr)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
        answer = _answer(work)
    except BaseException:  # noqa: BLE001  nothing may return to the parent's code
        answer = {"kind": "traceback", "error": "the harness itself", "text": traceback.format_exc()}
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(sender, data) :]
    os._exit(0)


def _answer(work: Callable[[], dict[str, str]]) -> dict[str, Any]:
    try:
        return {"kind": "content", "content": work()}
    except UserError as error:
        return {"kind": "refused", "error": str(error)}
    except SilentChangeError as error:
        return {"kind": "silent change", "error": str(error)}
    except MemoryError as error:
        return {"kind": "memory", "error": f"MemoryError: {error}", "text": traceback.format_exc()[-8000:]}
    except BaseException as error:  # noqa: BLE001  every other end is a fault
        if isinstance(error, OSError) and exit_code_of(error) != INTERNAL_FAULT:
            return {"kind": "refused", "error": in_one_line(error)}  # as every command line prints it
        line = " ".join(str(error).split())
        return {"kind": "traceback", "error": f"{type(error).__name__}: {line}", "text": traceback.format_exc()[-8000:]}


def _family(process: int) -> Iterator[Path]:
    """The folders in /proc of a process and of those that it started."""
    folder = Path(f"/proc/{process}")
    yield folder
    with contextlib.suppress(OSError):
        for child in (folder / "task" / str(process) / "children").read_text().split():
            yield from _family(int(child))


def _anonymous_bytes(process: int) -> int:
    """The memory of a process and its children that is not a file's."""
    total = 0
    for folder in _family(process):
        with contextlib.suppress(OSError):
            found = re.search(r"^RssAnon:\s*(\d+)", (folder / "status").read_text(errors="replace"), re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total


def _computed(process: int) -> float:
    """The seconds that a process and its children have computed, those that have ended included."""
    ticks = 0
    for folder in _family(process):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(child: int, first: int | None = None) -> None:
    """Ends a child and its own children; with `first`, that signal is sent before, for a dump of its stack."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if first is not None:
            os.killpg(child, first)
            time.sleep(0.5)
        os.killpg(child, signal.SIGKILL)
