"""Prints a script with which bash or zsh completes commands and options.

    scale-cpt completion bash > ~/.local/share/bash-completion/completions/scale-cpt
    scale-cpt completion zsh > "${fpath[1]}/_scale-cpt"

The shell reads the script when it starts.
"""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell that reads the script")


def main(arguments: argparse.Namespace) -> None:
    import shtab  # Here, so that no other command needs it.

    from pipeline.commands import build_parser

    print(shtab.complete(build_parser(), arguments.shell))
