"""Prints a script with which bash or zsh completes commands and options.

    scale-cpt completion bash > ~/.local/share/bash-completion/completions/scale-cpt
    scale-cpt completion zsh > "${fpath[1]}/_scale-cpt"

The shell reads the script when it starts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.command_line import folder_or_hub


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell that reads the script")


def main(arguments: argparse.Namespace) -> None:
    import shtab  # Here, so that no other command needs it.

    from pipeline.commands import build_parser

    parser = build_parser()
    _complete_paths(parser, shtab.FILE)
    print(shtab.complete(parser, arguments.shell))


def _complete_paths(parser: argparse.ArgumentParser, file: dict[str, str]) -> None:
    """Lets the shell complete the files and folders that a command takes; `file`: how."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, file)
        elif action.type in (Path, folder_or_hub) or action.metavar in ("FILE", "DIR"):
            action.complete = file  # type: ignore[attr-defined]  # which shtab reads
