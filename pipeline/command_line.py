"""Runs a tool's `main`: a user's fault ends in one line and a non-zero exit code, a bug in a traceback.

And types of arguments that several tools have.
"""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Callable

from pipeline import log
from pipeline.errors import INTERNAL_FAULT, INTERRUPTED, PASSING_FAULT, UserError


def run(main: Callable[[], int | None]) -> None:
    """Runs `main` and exits with its code; a `UserError`, a full disk or Ctrl-C ends in one line on stderr."""
    log.configure()
    try:
        code = main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        code = _report_system_error(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except Exception:  # noqa: BLE001  # Python's own exit code, 1, means a user's fault
        traceback.print_exc()
        code = INTERNAL_FAULT
    sys.exit(code)


def _report_system_error(error: OSError) -> int:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        traceback.print_exception(error)
        return INTERNAL_FAULT
    where = error.filename or "the output"
    print(f"error: no space left on the disk of {where}; free some and start again", file=sys.stderr)
    return PASSING_FAULT


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {number}")
    return number


def share(text: str) -> tuple[int, int]:
    """An argument K/N: the K-th of N jobs that share their work, from 0."""
    k, n = map(int, text.split("/"))
    if not 0 <= k < n:
        raise argparse.ArgumentTypeError(f"expected K/N with 0 <= K < N, found {text}")
    return k, n
