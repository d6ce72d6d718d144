"""Runs all runs that a study compares, several at a time; prints tables, writes summary.json.

    scale-cpt study configs/studies/korean_quick.yaml

Stopped (Ctrl-C) or killed, the same command continues; finished runs are skipped. On a cluster slurm/run_study.sh
submits every run as a job of its own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipeline import command_line, log

logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="its YAML file, e.g. configs/studies/korean.yaml")
    parser.add_argument(
        "--data",
        type=Path,
        default="examples/data",
        help="the folder of the texts (default: examples/data)",
    )
    parser.add_argument(
        "--jobs", type=command_line.positive, help="runs at a time (default: what the cores hold)"
    )
    parser.add_argument(
        "--due",
        action="store_true",
        help="only list what can start now: name, configuration, stages",
    )
    parser.add_argument(
        "--ended",
        nargs="*",
        default=[],
        help="with --due: tasks whose jobs are over: none may be due",
    )


def main(arguments: argparse.Namespace) -> None:
    from pipeline.studies.run_study import (
        open_study,
        run_study,
    )  # after the options: --help does not wait for torch
    from pipeline.studies.summary import summarise

    runs = open_study(arguments.study, arguments.data)
    if arguments.due:
        for task in runs.pending_tasks(arguments.ended):
            task.run.write()
            print(
                task.name, task.run.path, " ".join(task.stages), sep="\t"
            )  # folders may have spaces in their names
        return
    run_study(runs, arguments.jobs or max(1, len(os.sched_getaffinity(0)) // runs.study.ranks))
    folder = runs.study.folder
    print(summarise(runs))
    logger.info(
        "wrote %s/summary.json; as a page: scale-cpt report %s --output %s/report.html",
        folder,
        folder,
        folder,
    )


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
