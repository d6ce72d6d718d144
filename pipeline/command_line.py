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
from collections.abc import Callable
from datetime import date
from io import TextIOWrapper
from pathlib import Path

from pipeline import log
from pipeline.errors import (
    INTERNAL_FAULT,
    INTERRUPTED,
    ConfigError,
    UserError,
    exit_code_of,
    in_one_line,
)
from pipeline.files import with_pages_found
from pipeline.hub import model_folder


def run_parsed(
    main: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace
) -> None:
    """Runs the `main` of a command with its arguments, and exits with its exit code."""

    def checked() -> int | None:
        if getattr(arguments, "set", None) and arguments.run is None:
            raise ConfigError("--set changes a run; name its YAML file or its folder")
        return main(arguments)

    run(checked)


def run(main: Callable[[], int | None]) -> None:
    """Runs `main` and exits with its code; a fault of the user or the file system, or Ctrl-C, ends in one line."""
    log.configure()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(
            errors="surrogateescape"
        )  # a file's name is printed as it is, whatever its encoding
    try:
        code = main() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("interrupted")
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001  # Python's own exit code, 1, means a user's fault
        code = exit_code_of(error)
        if isinstance(error, BrokenPipeError) and _has_lost_reader():
            code = 128 + signal.SIGPIPE
        elif code == INTERNAL_FAULT and not isinstance(error, UserError):
            traceback.print_exc()
        else:
            _complain(f"error: {with_pages_found(in_one_line(error))}")
    sys.exit(code)


def _complain(text: str) -> None:
    """Prints a line to stderr. Nobody may read it any more, as after Ctrl-C in `2>&1 | tee`; the exit code stays."""
    with contextlib.suppress(OSError):
        log.clear_terminal_line()
        print(text, file=sys.stderr, flush=True)


def _has_lost_reader() -> bool:
    """Whether nobody reads what is printed any more, as in `... | head`; what is left is then not printed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    lost = any(events & select.POLLERR for _, events in poll.poll(0))
    if lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return lost


def add_run(parser: argparse._ActionsContainer, *, required: bool = True) -> None:
    """Adds the run that a program works on, for `load_config`, with `--set`."""
    what = "its YAML file, such as configs/demo.yaml, or the folder of one that has begun, such as runs/demo"
    parser.add_argument("run", type=Path, metavar="RUN", nargs=None if required else "?", help=what)
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
    """Adds --overwrite, for a program with an option --output."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace --output, whatever is there"
    )


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {number}")
    return number


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
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return int(number * 2**20)


def share(text: str) -> tuple[int, int]:
    """An argument K/N: the K-th of N jobs that share their work, from 0."""
    k, n = map(int, text.split("/"))
    if not 0 <= k < n:
        raise argparse.ArgumentTypeError(f"expected K/N with 0 <= K < N, found {text}")
    return k, n
