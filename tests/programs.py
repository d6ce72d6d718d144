"""Runs `scale-cpt`, `python -m studies`, or the main function of a command, in this process."""

from __future__ import annotations

import argparse
import logging
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from types import ModuleType
from unittest import mock

from pipeline import cli
from studies import __main__ as study_commands


def scale_cpt(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What `scale-cpt` does with these arguments: its exit code, and what it prints."""
    return _run(cli.main, "scale-cpt", arguments)


def study_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What `python -m studies` does with these arguments: its exit code, and what it prints."""
    return _run(study_commands.main, "studies", arguments)


def _run(
    main: Callable[[], None], program: str, arguments: tuple[object, ...]
) -> subprocess.CompletedProcess[str]:
    words = [str(argument) for argument in arguments]
    out = StringIO()
    err = StringIO()
    logger = logging.getLogger("pipeline")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            mock.patch("sys.argv", [program, *words]),
        ):
            main()
    except SystemExit as end:
        return subprocess.CompletedProcess(
            words, int(end.code or 0), out.getvalue(), err.getvalue()
        )
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    raise AssertionError("a command always exits")


def call(command: ModuleType, *arguments: object) -> int:
    """The exit code of a command's `main`; its errors are raised."""
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return command.main(parser.parse_args(list(map(str, arguments)))) or 0
