"""Decides whether a stage that ended is retried, and records its end.

    scale-cpt may-retry configs/demo.yaml --stage train --exit-code 137

Prints the reason. The exit code is 0 for yes and 3 for no, because 1 could also mean that Python
itself failed. The scripts of slurm/ call it after every stage that failed or was stopped.
"""

from __future__ import annotations

import argparse

from pipeline import command_line
from pipeline.config.run import load_config
from pipeline.run_folder.retry import decide_retry

NO = 3
"""The exit code for no."""


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    parser.add_argument("--stage", required=True, help="the stage that ended")
    parser.add_argument("--exit-code", type=int, required=True, help="the exit code of the stage")
    parser.add_argument(
        "--without-progress",
        type=command_line.non_negative,
        default=3,
        help="the most restarts in a row without a newer checkpoint (default: 3)",
    )
    parser.add_argument(
        "--most",
        type=command_line.non_negative,
        default=100,
        help="the most restarts in all (default: 100)",
    )


def main(arguments: argparse.Namespace) -> int:
    # A file system that is not mounted is no fault of the configuration: it raises OSError here.
    arguments.run.stat()
    config = load_config(arguments.run, arguments.set, base="named")
    decision = decide_retry(
        config.folder,
        stage=arguments.stage,
        exit_code=arguments.exit_code,
        without_progress=arguments.without_progress,
        most=arguments.most,
    )
    print(decision.why)
    return 0 if decision.again else NO
