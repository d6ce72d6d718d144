"""Runs a study: the runs that it compares, side by side on this machine; prints its tables and writes summary.json.

    python tools/run_study.py configs/studies/korean_quick.yaml

Stopped (Ctrl-C) or killed, the same command goes on; what is finished is not done again. On a cluster
slurm/run_study.sh makes every run a job of its own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipeline import command_line, log
from pipeline.errors import ConfigError

logger = log.get_logger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="its YAML file, e.g. configs/studies/korean.yaml")
    parser.add_argument("--data", type=Path, default="data", help="the texts (default: those that come along, data)")
    parser.add_argument("--jobs", type=int, help="runs side by side (default: as many as the cores hold)")
    parser.add_argument("--due", action="store_true", help="only list what can be done: name, configuration, stages")
    parser.add_argument("--ended", nargs="*", default=[], help="with --due: names; an error where one is due still")
    arguments = parser.parse_args()
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(f"--jobs: expected 1 or more, found {arguments.jobs}")
    from pipeline.experiments.conduct import (  # after the options: --help waits for no torch
        conduct,
        open_study,
        summarise,
    )
    from pipeline.experiments.pending import due_after

    runs = open_study(arguments.study, arguments.data)
    if arguments.due:
        for task in due_after(runs, arguments.ended):
            task.run.write()
            print(task.name, task.run.path, " ".join(task.stages), sep="\t")  # folders may have spaces in their names
        return
    conduct(runs, arguments.jobs or max(1, len(os.sched_getaffinity(0)) // runs.study.ranks))
    print(summarise(runs).as_text())
    folder = runs.study.folder
    logger.info(
        "wrote %s/summary.json; as a page: python tools/report.py %s --output %s/report.html", folder, folder, folder
    )


if __name__ == "__main__":
    command_line.run(main)
