"""Prints a run's state: running, waiting, done or failed; progress, speed and end.

    scale-cpt status runs/demo
    scale-cpt status runs/demo --json
    scale-cpt status runs/korean-quick

Of a folder of runs, each run that has started is shown in a line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.command_line import print_json
from pipeline.run_folder.status import as_lines, as_text, read_status, runs_in


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, help="a run's folder, such as runs/demo, or a folder of runs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, for a program (docs/json.md)"
    )


def main(arguments: argparse.Namespace) -> None:
    # Without torch: an answer in a fraction of a second, also on a login node.
    folders = runs_in(arguments.run)
    if folders:
        statuses = [read_status(folder) for folder in folders]
        if arguments.json:
            print_json(statuses)
        else:
            print(as_lines(statuses))
    else:
        status = read_status(arguments.run)
        if arguments.json:
            print_json(status)
        else:
            print(as_text(status))
