"""Prints a run's state: running, waiting, done or failed; progress, speed and end.

    scale-cpt status runs/demo
    scale-cpt status runs/demo --json
    scale-cpt status runs/korean

A study's folder gives a line for each run that has started.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson

from pipeline.run_folder.status import as_lines, as_text, read_status, runs_in


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder, e.g. runs/demo, or a study's")
    parser.add_argument("--json", action="store_true", help="for a program")


def main(arguments: argparse.Namespace) -> None:
    found = [read_status(folder) for folder in runs_in(arguments.run)] or read_status(arguments.run)
    if arguments.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        print(as_lines(found) if isinstance(found, list) else as_text(found))
