"""What every command line shares: one line and a non-zero exit for a user's fault, a traceback for a bug of ours."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from pipeline import log
from pipeline.errors import UserError

INTERRUPTED = 130
DISK_FULL = 1


def run(main: Callable[[], int | None]) -> None:
    """Runs `main` and exits with its code; a `UserError`, a full disk or Ctrl-C ends in one line on stderr."""
    log.configure()
    try:
        code = main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(
            f"error: no space left on the disk of {error.filename or 'the output'}; free some and start again",
            file=sys.stderr,
        )
        code = DISK_FULL
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
