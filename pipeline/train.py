"""Trains the run that a configuration describes. Every rank runs this program:

    torchrun --nproc-per-node=2 --module -- pipeline.train configs/demo.yaml

It goes on from the run's newest checkpoint, and does nothing where the run is finished. A signal (SIGTERM, SIGUSR1,
Ctrl-C) makes it save once more and leave with exit code 75.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipeline import command_line
from pipeline.training import launch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="the run's YAML file, e.g. configs/demo.yaml")
    arguments = parser.parse_args()

    device = launch.initialise(launch.read_launch(os.environ))
    from pipeline.training.run import run_training  # DeepSpeed chooses its accelerator when it is imported

    code = run_training(arguments.config, device)
    launch.finish()  # not after a fault: it waits for ranks that may hang in a collective
    return code


if __name__ == "__main__":
    launch.leave_after(lambda: command_line.run(main))
