"""Decides whether a stage that ended is retried, and records its end.

    scale-cpt may-retry --config configs/demo.yaml --stage train --exit-code 137

Prints the reason, and exits with 0 for yes and 3 for no; 1 would also mean that Python itself failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.run_folder.attempts import decide
from pipeline.run_folder.changes import add_set_option, read_run

NO = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    add_set_option(parser)
    parser.add_argument("--stage", required=True, help="the stage that ended")
    parser.add_argument("--exit-code", type=int, required=True, help="its exit code")
    parser.add_argument("--without-progress", type=int, default=3, help="restarts in a row with no newer checkpoint")
    parser.add_argument("--most", type=int, default=100, help="restarts in all")
    arguments = parser.parse_args()

    arguments.config.read_bytes()  # a missing file system is no fault of the configuration
    decision = decide(
        read_run(arguments.config, arguments.set, base="named").folder,
        stage=arguments.stage,
        exit_code=arguments.exit_code,
        without_progress=arguments.without_progress,
        most=arguments.most,
    )
    print(decision.why)
    return 0 if decision.again else NO


if __name__ == "__main__":
    command_line.run(main)
