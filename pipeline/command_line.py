"""Runs a command: a user's fault ends in one line and a non-zero exit code, a bug in a traceback.

Also the arguments, and types of arguments, that several commands share.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import date
from io import TextIOWrapper
from pathlib import Path
from typing import get_args

from pipeline import log
from pipeline.config.data import CHAT_DATE, ChatStart
from pipeline.errors import (
    INTERNAL_FAULT,
    INTERRUPTED,
    ConfigError,
    UserError,
    exit_code_of,
    in_one_line,
)
from pipeline.hub import model_folder
from pipeline.installation import locate_docs


def run_parsed(
    main: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace
) -> None:
    """Runs the `main` of a command with its arguments, and exits with its exit code.

    Raises:
        SystemExit: always, with the exit code of the command.
    """

    def checked() -> int | None:
        if getattr(arguments, "set", None) and arguments.run is None:
            raise ConfigError("--set changes a run; name its YAML file or its folder")
        return main(arguments)

    run(checked)


def run(main: Callable[[], int | None]) -> None:
    """Runs `main` and exits with its code.

    A fault of the user or the file system, or Ctrl-C, ends in one line; a bug ends in a traceback.
    """
    log.configure()
    if isinstance(sys.stdout, TextIOWrapper):
        # A file's name is printed as it is, whatever its encoding.
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        code = main() or 0
        # Here, where a full disk or a closed pipe still becomes an exit code.
        sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("interrupted")
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001  # Python's own exit code, 1, means a user's fault.
        code = exit_code_of(error)
        if isinstance(error, BrokenPipeError) and _has_lost_reader():
            # What a shell reports for programs that SIGPIPE ends, as Python sets it to be ignored.
            code = 128 + signal.SIGPIPE
        elif code == INTERNAL_FAULT and not isinstance(error, UserError):
            traceback.print_exc()
        else:
            _complain(f"error: {locate_docs(in_one_line(error))}")
    sys.exit(code)


def _complain(text: str) -> None:
    """Prints a line to stderr.

    Nobody may read it any more, as after Ctrl-C in `2>&1 | tee`: then the line is lost, and the
    exit code stays.
    """
    with contextlib.suppress(OSError):
        log.clear_terminal_line()
        print(text, file=sys.stderr, flush=True)


def _has_lost_reader() -> bool:
    """Whether nobody reads what is printed any more, as in `... | head`.

    Then what is left in the buffer is dropped, and Python does not fail on it when it exits.
    """
    poll = select.poll()
    poll.register(sys.stdout, 0)
    lost = any(events & select.POLLERR for _, events in poll.poll(0))
    if lost:
        # Python flushes stdout at its exit, and would print a second BrokenPipeError (its own
        # documentation of SIGPIPE).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return lost


def as_json(value: object) -> str:
    """A value as JSON, for a program; a number that is not finite becomes null."""
    import orjson  # Here, because most commands print none.

    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def print_json(value: object) -> None:
    """Prints a value as JSON, for a program."""
    print(as_json(value))


def add_run(parser: argparse._ActionsContainer, *, required: bool = True) -> None:
    """Adds the run that a command works on, for `load_config`, with `--set`."""
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        nargs=None if required else "?",
        help="a run's YAML file, such as configs/demo.yaml, or the folder of a run that has begun, "
        "such as runs/demo",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of the run, such as schedule.steps=20; may be repeated",
    )


def folder_or_hub(text: str) -> Path:
    """An argument that is a path, or a model on the Hugging Face hub, which is fetched."""
    return model_folder(Path(text))


def add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    """Adds --overwrite, for a command with an option --output."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace --output, whatever is there"
    )


def add_text_key_option(parser: argparse._ActionsContainer) -> None:
    """Adds --text-key, for a command that reads documents."""
    parser.add_argument(
        "--text-key",
        default="text",
        help="the key or column of a record's text (default: text)",
    )


def add_chat_date_option(parser: argparse._ActionsContainer) -> None:
    """Adds --chat-date, for a command that frames chats by a template."""
    parser.add_argument(
        "--chat-date",
        type=day,
        default=CHAT_DATE,
        metavar="YYYY-MM-DD",
        help=f"today's date, for a chat template that asks for it (default: {CHAT_DATE})",
    )


def add_chat_start_option(parser: argparse._ActionsContainer) -> None:
    """Adds --chat-start, for a command that makes corpora of chats."""
    parser.add_argument(
        "--chat-start",
        choices=get_args(ChatStart),
        default="template",
        help="what a chat begins with: what its template writes, or the start token that the "
        "tokenizer puts before every text (default: template)",
    )


def add_share_option(parser: argparse._ActionsContainer) -> None:
    """Adds --share, for a command whose work several jobs can share."""
    parser.add_argument(
        "--share",
        type=share,
        default=(0, 1),
        metavar="K/N",
        help="this is job K of N that share the work, from 0, as in a Slurm array",
    )


def add_report_option(parser: argparse._ActionsContainer) -> None:
    """Adds --report-on, for a command that compares tokenizers; `named_reports` reads it."""
    parser.add_argument(
        "--report-on",
        nargs="*",
        default=[],
        metavar="NAME=FILE",
        help="texts for the table, each with a name (default: the file's name)",
    )


def named_reports(arguments: Iterable[str]) -> dict[str, str]:
    """The files of --report-on, by name; raises as `named_files`."""
    return named_files("--report-on", arguments)


def named_files(option: str, arguments: Iterable[str]) -> dict[str, str]:
    """The files of an option whose arguments are NAME=FILE, or FILE, which is its own name.

    Raises:
        ConfigError: two have one name.
    """
    files: dict[str, str] = {}
    for argument in arguments:
        name, separator, file = argument.partition("=")
        # A path, or an address, may have the character itself.
        if not separator or "/" in name or Path(argument).exists():
            name = file = argument
        if name in files:
            raise ConfigError(
                f"{option}: expected each name once, found {name} for {files[name]} and for "
                f"{file}; give one of them another name"
            )
        files[name] = file
    return files


# The types of arguments below raise ArgumentTypeError for everything that they refuse: of a
# ValueError argparse would print the function's name, "invalid non_negative value".


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` on, and up to `most`."""
    expected = f"expected a whole number of {least} or more"
    if most is not None:
        expected = f"expected a whole number from {least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{expected}, found {text!r}")
        return number

    return parse


positive = whole_number(1)
"""An argument that is a whole number of at least 1."""
non_negative = whole_number(0)
"""An argument that is a whole number of at least 0."""


def fraction(text: str) -> float:
    """An argument that is a number from 0 to 1."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return number


def positive_number(text: str) -> float:
    """An argument that is a number above 0."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return number


def _number(text: str) -> float:
    """The number that `text` is; NaN, which no range includes, if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def day(text: str) -> date:
    """An argument that is a date: YYYY-MM-DD."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a date such as 2025-01-31, found {text!r}"
        ) from None


def mebibytes(text: str) -> int:
    """An argument in MiB, above 0: its bytes."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of MiB above 0, found {text!r}")
    return int(number * 2**20)


def share(text: str) -> tuple[int, int]:
    """An argument K/N: the K-th of N jobs that share their work, from 0."""
    expected = "expected K/N, two whole numbers with 0 <= K < N, such as 0/8"
    job, separator, jobs = text.partition("/")
    if not (separator and job.isdecimal() and jobs.isdecimal() and int(job) < int(jobs)):
        raise argparse.ArgumentTypeError(f"{expected}, found {text!r}")
    return int(job), int(jobs)
