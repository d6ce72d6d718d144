"""`scale-cpt COMMAND`: reads the command line and runs a command.

Only the command that is asked for is imported, so that `scale-cpt --help` answers at once.
"""

from __future__ import annotations

import sys

from pipeline.commands import PROGRAM, build_parser
from pipeline.errors import CONFIG_ERROR, ExtensionError
from pipeline.processes import use_utf8

FORMER_COMMANDS = {"study": "python -m studies run"}
"""Commands of earlier versions, each with what replaces it in a checkout of the project."""


def main() -> None:
    """Runs the command that `sys.argv` names with the arguments after it; exits with its code."""
    use_utf8()
    words = sys.argv[1:] or ["--help"]
    if words[0] in FORMER_COMMANDS:
        instead = " ".join([FORMER_COMMANDS[words[0]], *words[1:]])
        print(
            f"error: scale-cpt {words[0]} is now a command of the project's checkout: {instead}",
            file=sys.stderr,
        )
        sys.exit(CONFIG_ERROR)
    try:
        parser = build_parser(words[:1])
    except ExtensionError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    arguments = parser.parse_args(words)
    from pipeline import command_line  # After the parser: --help does not wait for its imports.

    # Libraries take the program's name from here.
    sys.argv = [f"{PROGRAM} {words[0]}", *words[1:]]
    command_line.run_parsed(arguments.main, arguments)
