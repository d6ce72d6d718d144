"""How long a command of scale-cpt takes until it prints its first line, and until it ends.

    python -m benchmarks.startup
    python -m benchmarks.startup --only bases "config init" --rounds 5

Makes a small trained run, then starts every command as a user does: as a process of its own, on a
terminal. Commands that end soon are timed to their end, the others are killed after their first
line. On a machine with other load take the processor time. Of one more start it is counted which
modules Python imports before the first line: `modules` is their number, `libraries` names the large
ones among them.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import step_files
from benchmarks.results import (
    DATA,
    ROOT,
    STORIES,
    Row,
    in_turns,
    make_parser,
    print_rows,
    write_rows,
)

LIBRARIES = ("torch", "transformers", "deepspeed", "datasets", "datatrove", "matplotlib")
"""Those whose import alone takes from half a second to seconds."""
NEW_TEXT = f"{DATA}/ko/reviews.heldout.jsonl.zst"
OLD_TEXT = f"{DATA}/en/stories.heldout.jsonl.zst"
CONFIG = f"""
extends: plain.yaml
name: startup
data:
  replay_fraction: 0.5
  corpora:
    english:
      input: [{OLD_TEXT}]
      heldout_input: [{OLD_TEXT}]
      role: replay
gate: {{}}
schedule: {{micro_batch_size: 1}}
"""
"""What the run has beside that of `benchmarks.step_files`: replay, a gate, and a batch for two
ranks."""
_FRESH = ("--set", "folder={new}/run", "--set", "data.folder={new}/tokens")
"""Gives a stage of the run work to do."""
_CLEANED = (
    *("--set", f"data.corpora.korean.input=[{DATA}/ko/reviews.jsonl.zst]"),
    *("--set", "data.corpora.korean.clean={language: ko}"),
)
_OWN_TEXT = "data.corpora.own={role: self_generated, sample: {tokens: 2000}}"


class Case(NamedTuple):
    """A call of a command: `{run}` is the run, `{new}` a folder that each call has for itself."""

    words: tuple[str, ...]
    ends: bool = True
    """Whether it is timed to its end: else it is killed after its first line."""
    codes: tuple[int, ...] = (0,)
    """Exit codes that it may have."""


CASES: Mapping[str, Case] = {
    "--help": Case(("--help",)),
    "config show": Case(("config", "show", "{run}")),
    "config init": Case(
        (
            *("config", "init", "--base", str(STORIES), "--new", NEW_TEXT, "--old", OLD_TEXT),
            *("--output", "{new}/first.yaml", "--hours", "0.1"),
        )
    ),
    "clean": Case(("clean", "{run}", *_FRESH, *_CLEANED), ends=False),
    "tokenize": Case(("tokenize", "{run}", *_FRESH), ends=False),
    "tokenize, done": Case(("tokenize", "{run}")),
    "tokenize --input": Case(
        (
            *("tokenize", "--input", OLD_TEXT, "--tokenizer", str(STORIES)),
            *("--output", "{new}/corpus"),
        )
    ),
    "sample": Case(("sample", "{run}", *_FRESH, "--set", _OWN_TEXT), ends=False),
    "upscale": Case(("upscale", "{run}", *_FRESH), ends=False),
    "upscale, done": Case(("upscale", "{run}")),
    "train": Case(("train", "{run}"), ends=False),
    "train --dry-run": Case(("train", "{run}", "--dry-run")),
    "gate": Case(("gate", "{run}"), ends=False),
    "convert": Case(("convert", "{run}", "--output", "{new}/hf"), ends=False),
    "evaluate": Case(("evaluate", "{run}"), ends=False),
    "evaluate --model": Case(
        ("evaluate", "--model", str(STORIES), "--data", OLD_TEXT, "--max-bytes", "1000"), ends=False
    ),
    "combine": Case(("combine", "{new}/served", "a={run}", "b={run}"), ends=False),
    "new": Case(("new", "{new}/runs")),
    "bases": Case(("bases",)),
    "bases TYPE": Case(("bases", "llama")),
    "bases FOLDER": Case(("bases", str(STORIES))),
    "combinations": Case(("combinations",), ends=False),
    "combinations --why": Case(("combinations", "--why", "lora", "compile")),
    "try": Case(("try", "{run}", "--set", "folder={new}/run"), ends=False),
    "try --prepare": Case(("try", "{run}", "--set", "folder={new}/run", "--prepare")),
    "estimate": Case(("estimate", "{run}")),
    "tokenizer": Case(
        ("tokenizer", "--input", OLD_TEXT, "--vocab-size", "400", "--output", "{new}/t.json")
    ),
    "vocabulary": Case(
        (
            *("vocabulary", "--base", str(STORIES), "--corpus", NEW_TEXT, "--old-texts", OLD_TEXT),
            *("--add", "100", "--output", "{new}/vocabulary"),
        )
    ),
    "status": Case(("status", "{run}")),
    "report": Case(("report", "{run}", "--output", "{new}/report.html")),
    "inspect": Case(("inspect", "{run}")),
    "inspect-data": Case(("inspect-data", "{run}/tokens/korean", "--tokenizer", str(STORIES))),
    "may-retry": Case(
        ("may-retry", "{run}", "--stage", "train", "--exit-code", "137"), codes=(0, 3)
    ),
    "describe-config": Case(("describe-config",)),
    "completion": Case(("completion", "bash")),
}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LINE_END = re.compile(r"[\r\n]+")
"""A progress bar ends its line with a carriage return."""
_IMPORTED = re.compile(r"import time: +\d+ \| +\d+ \| *(\S+)")
"""A line of `python -X importtime`."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STAMP = re.compile(r"^\S+ \[main\] . ")
"""What a line of the log begins with."""
_WINDOW = (24, 80, 0, 0)
"""Lines and columns of the terminal; its size in pixels is unknown."""
_SHOWN = 60
"""Characters of a first line that the table has."""
_SHOWN_OF_FAULT = 3000


class Start(NamedTuple):
    """One start of a command. Processor times are of all its processes."""

    first_line: str
    """What it printed first; "" of one that printed nothing."""
    seconds: float
    """Until its first line; until its end if it printed nothing."""
    cpu_seconds: float
    end_seconds: float | None
    """None: it was killed after its first line."""
    end_cpu_seconds: float | None
    imported: Sequence[str]
    """Modules, in a start with `-X importtime`: those before the first line."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="COMMAND", help="these rows (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="starts of each command (default: 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder))
        ways: dict[str, Callable[[], Start]] = {}
        for name in arguments.only or CASES:
            ways[name] = partial(start, CASES[name], run)
        rows: list[Row] = []
        for name, starts in in_turns(ways, arguments.rounds).items():
            recorded = record_imports(CASES[name], run)
            row = {"command": name, **_times(starts), **_imports(recorded)}
            rows.append({**row, "first_line": _shown(recorded.first_line, run)})
    # The first row may lack a figure.
    print_rows(rows, [*dict.fromkeys(name for row in rows for name in row)])
    write_rows(arguments, rows)


def make_run(folder: Path) -> Path:
    """Trains a small run in `folder`, and returns the run's folder.

    Raises:
        SystemExit: a stage fails; with the end of its output.
    """
    config = folder / "startup.yaml"
    run = folder / "run"
    (folder / "plain.yaml").write_text(step_files.CONFIG.format(folder=run), encoding="utf-8")
    config.write_text(CONFIG, encoding="utf-8")
    for command in ("tokenize", "upscale", "train"):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", command, str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
            cwd=ROOT,
        )
        if done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return run


def start(case: Case, run: Path, *options: str) -> Start:
    """Starts a command, with these options of Python.

    Raises:
        SystemExit: it fails, or its first line is an error; with the end of its output.
    """
    # Of a start that was killed: the next one would first say that it takes the lock over.
    for lock in run.glob("*.lock"):
        lock.unlink()
    with tempfile.TemporaryDirectory() as new:
        words = [word.replace("{run}", str(run)).replace("{new}", new) for word in case.words]
        # A terminal: into a pipe Python writes what is printed only when much of it is there.
        terminal, its_end = pty.openpty()
        # Without a width no progress bar would be drawn.
        fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", *_WINDOW))
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *options, "-m", "pipeline", *words],
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
            env=_environment(),
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(its_end)
        try:
            found, printed = _watch(process, terminal, began, to_end=case.ends)
        finally:
            os.close(terminal)
    failed = process.returncode not in case.codes if case.ends else not found.first_line
    if failed or found.first_line.startswith(("error", "Traceback")):
        raise SystemExit(
            f"{' '.join(words)}\nended with {process.returncode}:\n{printed[-_SHOWN_OF_FAULT:]}"
        )
    return found


def record_imports(case: Case, run: Path) -> Start:
    """Starts a command until its first line, and records what it imports; raises as `start`."""
    return start(case._replace(ends=False), run, "-X", "importtime")


def large_libraries(recorded: Start) -> list[str]:
    """Those of `LIBRARIES` that were imported before the first line."""
    packages = {module.partition(".")[0] for module in recorded.imported}
    return [library for library in LIBRARIES if library in packages]


def _watch(
    process: subprocess.Popen[bytes], terminal: int, began: float, *, to_end: bool
) -> tuple[Start, str]:
    """Reads what a process prints, until its first line or its end; what it took, and the text."""
    printed = ""
    found: Start | None = None
    cpu_seconds = 0.0
    while data := _read(terminal):
        printed += data
        seconds = time.perf_counter() - began
        cpu_seconds = _cpu_seconds_of_session(process.pid)
        if found is not None:
            continue
        imported, first_line = _before_and_first_line(printed)
        if first_line:
            found = Start(first_line, seconds, cpu_seconds, None, None, imported)
            if not to_end:
                os.killpg(process.pid, signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    # A server of forks outlives the command, which does not wait for it: its time is only known as
    # of the last output.
    cpu_seconds = max(usage.ru_utime + usage.ru_stime, cpu_seconds)
    if found is None:
        imported, _ = _before_and_first_line(printed)
        found = Start("", seconds, cpu_seconds, None, None, imported)
    if to_end:
        found = found._replace(end_seconds=seconds, end_cpu_seconds=cpu_seconds)
    return found, printed


def _read(terminal: int) -> str:
    """What was printed since; "" at the end."""
    try:
        return os.read(terminal, 2**16).decode(errors="replace")
    except OSError:  # EIO: no process has the terminal open any more
        return ""


def _before_and_first_line(printed: str) -> tuple[list[str], str]:
    """The modules that were imported before the first whole line, and that line, or ""."""
    imported: list[str] = []
    *lines, _ = _LINE_END.split(_ESCAPES.sub("", printed))
    for line in filter(str.strip, lines):
        module = _IMPORTED.match(line)
        if module is not None:
            imported.append(module[1])
        # The heading of importtime.
        elif not line.startswith("import time:"):
            return imported, line
    return imported, ""


def _cpu_seconds_of_session(session: int) -> float:
    """The processor time so far of the processes of a session, and of those they waited for."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may have spaces: proc_pid_stat(5) from its third field on.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_S


def _times(starts: Sequence[Start]) -> Row:
    """Medians of what the starts of a command took."""
    row: Row = {
        "first_line_cpu_s": median(one.cpu_seconds for one in starts),
        "first_line_s": median(one.seconds for one in starts),
    }
    ends = [one.end_seconds for one in starts if one.end_seconds is not None]
    cpu_ends = [one.end_cpu_seconds for one in starts if one.end_cpu_seconds is not None]
    if ends:
        row |= {"end_cpu_s": median(cpu_ends), "end_s": median(ends)}
    return row


def _imports(recorded: Start) -> Row:
    """What was imported before the first line."""
    libraries = " ".join(large_libraries(recorded))
    return {"modules": len(recorded.imported), "libraries": libraries or "-"}


def _shown(line: str, run: Path) -> str:
    """A line for the table: without the time of day, and paths of this machine."""
    text = _STAMP.sub("", line).replace(str(run), "RUN").replace(f"{ROOT}/", "")
    return text[:_SHOWN]


def _environment() -> dict[str, str]:
    """This process's, with this checkout's package."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Asking the hub for a newer version of a local file would be in the time.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    main()
