"""Trains a run, from its newest checkpoint on.

    scale-cpt train --ranks 2 configs/demo.yaml
    torchrun --nproc-per-node=2 --module -- pipeline train configs/demo.yaml
    scale-cpt train --dry-run --gpus 16 configs/demo.yaml

Every rank runs this command: a launcher such as torchrun or srun starts the ranks, or --ranks on
this machine. On a signal (SIGTERM, SIGUSR1, Ctrl-C) training saves and exits with code 75, and the
same command continues. --dry-run prints the run's plan, on any machine, and exits with 0 if nothing
would stop the run.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path

from pipeline import command_line, log
from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.local_ranks import run_ranks
from pipeline.sizing.cluster import Cluster, add_cluster_options, cluster_of

_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    parser.add_argument(
        "--ranks",
        type=command_line.positive,
        help="without a launcher: start this many ranks on this machine",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan instead of training")
    planned = parser.add_argument_group("with --dry-run")
    planned.add_argument(
        "--json", action="store_true", help="print one JSON object, for a program (docs/json.md)"
    )
    add_cluster_options(planned)
    planned.add_argument(
        "--base-config",
        type=Path,
        help="the base's config.json, if its folder is not on this machine",
    )


def main(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        return _dry_run(arguments)
    planned = [field.name for field in fields(Cluster) if hasattr(arguments, field.name)]
    if planned or arguments.base_config or arguments.json:
        raise ConfigError(
            "only --dry-run takes these options: training gets its ranks from the launcher, "
            "or --ranks"
        )
    if arguments.ranks is not None:
        return _start_ranks(arguments)
    _logger.info("training %s: loading the libraries, then the base", arguments.run)
    from pipeline.training import launch  # Here, because it loads torch.

    return launch.leave_after(lambda: command_line.run(lambda: _train(arguments)))


def _dry_run(arguments: argparse.Namespace) -> int:
    """Prints the plan of the run. Returns 1 if the run could not start."""
    config = load_config(arguments.run, arguments.set)
    _logger.info("planning %s: loading the libraries, then the base", config.name)
    # Here, because the ranks of training need none of its imports.
    from pipeline.checks.dry_run.make_plan import make_plan

    plan = make_plan(config, cluster_of(arguments), arguments.base_config)
    if arguments.json:
        command_line.print_json(plan.values())
    else:
        print(plan)
    return 1 if plan.faults else 0


def _start_ranks(arguments: argparse.Namespace) -> int:
    """Runs this command on several ranks of this machine; returns their highest exit code."""
    cores = len(os.sched_getaffinity(0))
    # Otherwise each rank would start a thread for every core, and the ranks would slow each other
    # down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // arguments.ranks)))
    command = ["-m", "pipeline", "train", str(arguments.run)]
    command += [f"--set={change}" for change in arguments.set]
    return run_ranks(command, arguments.ranks)


def _train(arguments: argparse.Namespace) -> int:
    """Trains as one rank; returns the exit code."""
    import torch

    from pipeline.training import launch

    device = launch.initialise(launch.read_launch(os.environ))
    # Again: now the environment says which rank this is, whatever launcher started it.
    log.configure()
    # DeepSpeed chooses its accelerator when it is imported, which must be after `initialise`.
    from pipeline.observers import make_observers
    from pipeline.training.attempt import run_training

    code = run_training(arguments.run, device, make_observers, arguments.set)
    # Not after a fault: it would wait for ranks that may hang in a collective.
    torch.distributed.destroy_process_group()
    return code
