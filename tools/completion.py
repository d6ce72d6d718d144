"""Prints a script with which bash or zsh completes the commands of scale-cpt and their options.

    scale-cpt completion bash > ~/.local/share/bash-completion/completions/scale-cpt
    scale-cpt completion zsh > "${fpath[1]}/_scale-cpt"

The shell reads the script when it starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from pipeline import __version__, command_line
from pipeline.cli import PROGRAM, PROGRAMS, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=["bash", "zsh"])
    shell = parser.parse_args().shell
    import shtab  # here, so that the help needs no package

    print(shtab.complete(whole_parser(), shell))


def whole_parser() -> argparse.ArgumentParser:
    """A parser of the front with those of all commands."""
    import shtab

    front = argparse.ArgumentParser(prog=PROGRAM)
    front.add_argument("--version", action="version", version=__version__)
    commands = front.add_subparsers()
    for command, program in PROGRAMS.items():
        own = parser_of(program)
        summary = (own.description or "").strip().splitlines()[0]
        added = commands.add_parser(command, parents=[own], add_help=False, help=summary, description=summary)
        for action in added._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return front


class _FoundError(Exception):
    """A program has made its parser."""


def parser_of(program: str) -> argparse.ArgumentParser:
    """The parser of a program, which is run up to where it would read its arguments."""
    with _stopped_at_arguments() as found, suppress(_FoundError):
        load(program).main()
    return found[0]


@contextmanager
def _stopped_at_arguments() -> Iterator[list[argparse.ArgumentParser]]:
    found: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        found.append(parser)
        raise _FoundError

    original, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, stop  # type: ignore[assignment]
    try:
        yield found
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]


if __name__ == "__main__":
    command_line.run(main)
