"""`scale-cpt COMMAND`: reads the command line and runs the command, a module of `pipeline.commands`.

Only the command that is asked for is imported, so that `scale-cpt --help` answers at once.
"""

from __future__ import annotations

import sys

from pipeline.commands import PROGRAM, build_parser
from pipeline.files import use_utf8


def main() -> None:
    """Runs the command that `sys.argv` names, with the arguments after it, and exits with its exit code."""
    use_utf8()
    words = sys.argv[1:] or ["--help"]
    arguments = build_parser(words[:1]).parse_args(words)
    from pipeline import command_line  # After the parser: --help does not wait for its imports.

    # Libraries take the program's name from here.
    sys.argv = [f"{PROGRAM} {words[0]}", *words[1:]]
    command_line.run_parsed(arguments.main, arguments)
