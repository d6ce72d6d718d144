"""Trains the run that a configuration describes.

    scale-cpt train --ranks 2 configs/demo.yaml
    torchrun --nproc-per-node=2 --module -- pipeline.train configs/demo.yaml

Every rank runs this program; --ranks starts them on this machine.

With --dry-run a single process, on any machine, prints the run's plan and what would prevent it, and exits with 0 only
if nothing would:

    scale-cpt train --dry-run --gpus 16 configs/demo.yaml

Training resumes from the run's newest checkpoint, and does nothing if the run is finished. On a signal (SIGTERM,
SIGUSR1, Ctrl-C) it saves and exits with code 75.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from pipeline import command_line, log
from pipeline.local_ranks import exit_grace_s, run_ranks
from pipeline.run_folder.changes import add_set_option
from pipeline.sizing.cluster import add_cluster_options
from pipeline.training import launch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="the run's YAML file, e.g. configs/demo.yaml")
    add_set_option(parser)
    parser.add_argument("--ranks", type=command_line.positive, help="without a launcher: start so many processes here")
    parser.add_argument("--dry-run", action="store_true", help="print the plan instead of training")
    planned = parser.add_argument_group("with --dry-run")
    add_cluster_options(planned)
    planned.add_argument(
        "--base-config", type=Path, help="the base's config.json, if its folder is not on this machine"
    )
    planned.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args()
    if arguments.dry_run:
        from pipeline.dry_run import dry_run  # training's ranks need none of it

        return dry_run(arguments)
    own = [str(arguments.config), *(f"--set={change}" for change in arguments.set)]
    ranks, arguments.ranks = arguments.ranks, None
    if arguments != parser.parse_args(own):
        parser.error("only --dry-run takes these options: training gets its ranks from the launcher, or from --ranks")

    if ranks is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
        return run_ranks([sys.executable, "-m", "pipeline.train", *own], ranks, exit_grace_s())
    device = launch.initialise(launch.read_launch(os.environ))
    log.configure()  # again: now the environment says which rank this is, whatever launcher started it
    from pipeline.observers import make_observers
    from pipeline.training.run import run_training  # DeepSpeed chooses its accelerator when it is imported

    code = run_training(arguments.config, device, make_observers, arguments.set)
    launch.finish()  # not after a fault: it waits for ranks that may hang in a collective
    return code


def run() -> NoReturn:
    """Runs this program and ends the process."""
    launch.leave_after(lambda: command_line.run(main))


if __name__ == "__main__":
    run()
