"""Calls a program of tools/ in this process."""

from __future__ import annotations

import argparse
from types import ModuleType


def call(program: ModuleType, *arguments: object) -> int:
    """The exit code of the program's `main`; its errors are raised."""
    parser = argparse.ArgumentParser()
    program.add_options(parser)
    return program.main(parser.parse_args(list(map(str, arguments)))) or 0
