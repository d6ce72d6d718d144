"""Starts one process per rank on this machine, and exits with their highest exit code.

    scale-cpt launch --ranks 2 -m pipeline.train configs/demo.yaml

torchrun exits with 1 whatever its ranks' codes are, waits half a minute for a stopped rank, and starts each rank in a
session of its own, where it survives when torchrun is killed.
"""

from __future__ import annotations

import argparse
import sys

from pipeline import command_line
from pipeline.errors import ConfigError
from pipeline.local_ranks import exit_grace_s, run_ranks


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, required=True, help="how many processes")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", help="a Python file or module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")


def main(arguments: argparse.Namespace) -> int:
    if arguments.ranks < 1:
        raise ConfigError(f"--ranks: expected 1 or more, found {arguments.ranks}")

    command = [sys.executable, *(["-m"] if arguments.module else []), arguments.program, *arguments.arguments]
    return run_ranks(command, arguments.ranks, exit_grace_s())


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
