"""Decides whether a stage that ended is retried, and records its end.

    scale-cpt may-retry configs/demo.yaml --stage train --exit-code 137

Prints the reason, and exits with 0 for yes and 3 for no; 1 would also mean that Python itself failed.
"""

from __future__ import annotations

import argparse

from pipeline import command_line
from pipeline.config.run import load_config
from pipeline.run_folder.attempts import decide

NO = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    parser.add_argument("--stage", required=True, help="the stage that ended")
    parser.add_argument("--exit-code", type=int, required=True, help="its exit code")
    parser.add_argument(
        "--without-progress", type=int, default=3, help="restarts in a row with no newer checkpoint"
    )
    parser.add_argument("--most", type=int, default=100, help="restarts in all")


def main(arguments: argparse.Namespace) -> int:
    arguments.run.stat()  # a missing file system is no fault of the configuration
    decision = decide(
        load_config(arguments.run, arguments.set, base="named").folder,
        stage=arguments.stage,
        exit_code=arguments.exit_code,
        without_progress=arguments.without_progress,
        most=arguments.most,
    )
    print(decision.why)
    return 0 if decision.again else NO
